"""Note added to out-of-memory errors: what the step needs, what the device has, and which goal would fit."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from olla.base import human_bytes
from olla.graph import Graph
from olla.recompute.curve import pareto

_CURVE_SECONDS = 3.0
_LIBRARIES = 64 << 20  # bytes: what cuBLAS keeps for a stream, 32 MiB on an H100, and the ends of segments


class Needs(NamedTuple):
    """What a planned step takes, in bytes.

    Attributes:
        resident_bytes: of parameters, buffers, optimizer state and batch.
        arena_bytes: of its arena, or as far as the graph tells where it has not run yet.
        output_bytes: of what it gives back.
        largest_bytes: of its largest tensor.
    """

    resident_bytes: int
    arena_bytes: int
    output_bytes: int
    largest_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.resident_bytes + self.arena_bytes + self.output_bytes


def out_of_memory_note(graph: Graph, needs: Needs, peak_bytes: int) -> str:
    """Return the note for a step that ran out of memory on the current device.

    Of the step, only the resident tensors are still allocated.

    Args:
        graph: of the step as it was captured, with its workspaces where they are known.
        needs: of its plan.
        peak_bytes: of its plan, without the gaps of the arena.
    """
    free, total = torch.cuda.mem_get_info()
    others = max(torch.cuda.memory_allocated() - needs.resident_bytes, 0)
    room = max(free + torch.cuda.memory_reserved() - others - _LIBRARIES, 0)
    said = (
        f"olla: the step needs {human_bytes(needs.num_bytes)} as it is planned: {human_bytes(needs.resident_bytes)} "
        f"resident, an arena of {human_bytes(needs.arena_bytes)}, {human_bytes(needs.output_bytes)} of results; its "
        f"largest tensor has {human_bytes(needs.largest_bytes)}. The device has {human_bytes(total)}, of which "
        f"{human_bytes(room)} can be had for it; {human_bytes(others)} are other tensors of this process, and "
        f"{human_bytes(_LIBRARIES)} are left to libraries."
    )
    if needs.num_bytes <= room:
        return (
            f"{said} That fits but for what lies between: call torch.cuda.empty_cache(), or step.release() of others."
        )
    return f"{said} {_remedy(graph, room - max(needs.num_bytes - peak_bytes, 0), room)}"


def _remedy(graph: Graph, most_bytes: int, room: int) -> str:
    """Return which goal brings the peak down to most_bytes."""
    curve = pareto(graph, time_limit=_CURVE_SECONDS)
    fits = np.flatnonzero(curve.peak_bytes <= most_bytes)
    if not len(fits):
        return (
            "With recomputation and results in place, its operators need "
            f"{human_bytes(int(curve.peak_bytes[-1]))} at least: take a smaller batch, or let tensors go to the host "
            "with swap=True."
        )
    slowdown = float(curve.added_seconds[fits[0]]) / max(curve.base_seconds, 1e-12)
    percent = max(math.ceil(100 * slowdown), 1)
    return (
        f"olla.compile(..., budget={room}) fits, or max_slowdown={percent / 100:g}: by estimate "
        f"{human_bytes(int(curve.peak_bytes[fits[0]]))} for {100 * slowdown:.1f} % of added time."
    )
