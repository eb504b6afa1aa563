"""Raise Inductor's inlining thresholds on a GPU to what the planner assumes: readers recompute such values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from olla.inductor.compat import compat

# A pointwise result with several readers is put in memory where it takes more reads or operations than this. Inductor
# has 4 and 30 on a GPU; the gradient of a cross-entropy takes 5 reads, and would lie beside the logits it is made from.
# Name -> Inductor's value for a GPU, and ours.
THRESHOLDS = {
    "realize_reads_threshold": (4, 8),
    "realize_opcount_threshold": (30, 50),  # what it has for a CPU, as the next
    "realize_acc_reads_threshold": (8, 12),  # whoever reads it
}


def patches() -> Mapping[str, Any]:
    """Return what this changes in Inductor's configuration, by name: nothing on machines without a GPU.

    What a user has changed stays.
    """
    if not torch.cuda.is_available():
        return {}
    return {name: most for name, (usual, most) in THRESHOLDS.items() if getattr(compat.config, name) in (None, usual)}
