"""Functions that hold several kernels: where they have to end so that what is done with can be freed.

Inductor for the CPU puts kernels that follow each other into one function. All that its kernels read and write is in
memory until it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from olla._core import profile
from olla.graph import Graph
from olla.inductor.kernels import scheduler as inductor


def ends(nodes: Sequence[Any], graph: Graph, order: npt.NDArray[np.int32]) -> set[str]:
    """Return the names of the kernels behind which a function ends that would else need more than the graph's peak.

    Args:
        nodes: scheduler nodes in the order in which they run.
        graph: of these nodes.
        order: int32[num_ops], the op that node i is.

    Complexity:
        O(nodes + tensors).
    """
    lives = profile(graph.core, order)
    first, live = lives.first, lives.live_bytes
    made = np.zeros(graph.num_ops, dtype=np.int64)
    at = (first >= 0) & ~graph.donated
    np.add.at(made, first[at], graph.tensor_bytes[at])
    found: set[str] = set()
    needed, newest = 0, None  # of the function that is open: its bytes, and its last kernel
    for i, node in enumerate(nodes):
        if not inductor.shares_function(node):
            newest = None
            continue
        needed = int(live[i]) if newest is None else needed + int(made[i])
        if newest is not None and needed > lives.peak_bytes:
            found.add(newest.get_name())
            needed = int(live[i])
        if inductor.has_code(node):
            newest = node
    return found
