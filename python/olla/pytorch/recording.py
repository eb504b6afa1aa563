"""From one recorded step to places in the arena: every request of every operator, workspaces of kernels included."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.graph import Graph
from olla.pipeline import Progress
from olla.pytorch.replay import Allocations, Table

Int64 = NDArray[np.int64]


class Arranged(NamedTuple):
    """Where all requests of a step go.

    Attributes:
        table: for olla.pytorch.replay; what outlives the step is left to torch's own allocator.
        load_bytes: most bytes of the arena in use at once.
        output_bytes: what outlives the step.
    """

    table: Table
    load_bytes: int
    output_bytes: int


def arrange(
    recorded: Allocations, num_ops: int, alignment: int, time_limit: float, seed: int, progress: Progress | None = None
) -> Arranged:
    """Lay the requests of a recorded step out in an arena.

    Time is counted in requests: one that is freed before the next one is made can give it its place, even inside one
    operator. So the load is what will be in use, to the byte.

    Args:
        recorded: the step; what was alive when the recording stopped outlives the step.
        num_ops: of the step.
        alignment: bytes; sizes are rounded up to it.
        time_limit: seconds for the layout.
        seed: for its random choices.
        progress: see olla.plan.

    Example:
        >>> ids = np.zeros(2, np.int32)
        >>> recorded = Allocations(ids, np.arange(2, dtype=np.int32), np.array([100, 50]), ids, np.array([1, 2]))
        >>> arranged = arrange(recorded, 1, 64, 1.0, 0)
        >>> arranged.load_bytes, arranged.table.offsets.tolist()
        (128, [0, 0])
    """
    size = _rounded(recorded.num_bytes, alignment)
    offsets = np.full(len(size), -1, dtype=np.int64)
    dies = np.flatnonzero(recorded.freed_at >= 0)
    arena_bytes = load_bytes = 0
    if len(dies):
        offsets[dies], arena_bytes, load_bytes, _, _ = _core.layout(
            dies.astype(np.int64), recorded.freed_at[dies], size[dies], alignment, time_limit, seed, progress
        )
    by_op = np.lexsort((recorded.index, recorded.op))
    op_offset = np.zeros(num_ops + 1, dtype=np.int64)
    np.cumsum(np.bincount(recorded.op, minlength=num_ops), out=op_offset[1:])
    table = Table(arena_bytes, op_offset, recorded.num_bytes[by_op], offsets[by_op], alignment)
    return Arranged(table, load_bytes, int(size.sum() - size[dies].sum()))


def program_peak(recorded: Allocations, graph: Graph, alignment: int) -> int:
    """Return the peak of the program order in bytes, with the workspaces of a recorded step in any order.

    Args:
        recorded: the step.
        graph: its graph, without workspaces.
        alignment: bytes; sizes are rounded up to it.
    """
    sizes = graph.tensor_bytes.copy()
    written = graph.writes.item
    sizes[written] = _rounded(sizes[written], alignment)
    workspaces = _workspaces(recorded, graph, sizes, alignment)
    whole = dataclasses.replace(graph, tensor_bytes=sizes, workspace_bytes=workspaces)
    peak: int = _core.profile(whole.core, np.arange(graph.num_ops, dtype=np.int32))[3]
    return peak


def _workspaces(recorded: Allocations, graph: Graph, sizes: Int64, alignment: int) -> Int64:
    """Return, for each op, what its own requests hold at once above what it writes: int64[num_ops]."""
    requested = _rounded(recorded.num_bytes, alignment)
    starts = np.flatnonzero(np.diff(recorded.op, prepend=-1))  # first request of each op that makes one
    ends = np.append(starts[1:], len(recorded.op))
    end_of = np.repeat(ends, ends - starts)
    inside = (recorded.freed_at >= 0) & (recorded.freed_at < end_of)
    change = requested.copy()
    np.subtract.at(change, recorded.freed_at[inside], requested[inside])
    held = np.cumsum(change)
    held -= np.repeat(held[starts] - change[starts], ends - starts)
    most = np.zeros(graph.num_ops, dtype=np.int64)
    if len(starts):
        most[recorded.op[starts]] = np.maximum.reduceat(held, starts)
    owner = np.repeat(np.arange(graph.num_ops), np.diff(graph.writes.offset))
    written = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(written, owner, sizes[graph.writes.item])
    most -= written
    return most.clip(min=0)


def _rounded(num_bytes: Int64, alignment: int) -> Int64:
    rounded: Int64 = -(-num_bytes // alignment) * alignment
    return rounded
