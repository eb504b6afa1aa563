"""From one recorded step to places in the arena: every request of every operator, workspaces of kernels included."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from olla.base import Progress
from olla.graph import Graph
from olla.layout import LayoutOptions, place, rounded_up
from olla.plan import Plan, Status
from olla.planner import plan
from olla.pytorch.memory.replay import Allocations, Int32, Int64, Table
from olla.pytorch.memory.requests import Requests


class Arranged(NamedTuple):
    """The layout of all requests of a step.

    Attributes:
        table: for olla.pytorch.memory.replay; what outlives the step is left to torch's own allocator.
        load_bytes: most bytes of the arena in use at once.
        output_bytes: of what outlives the step.
        peak_bytes: most bytes in use at once, in the arena and by what outlives the step and was already allocated.
        freed_in: int32[m], of each request: the op that runs, or ran last, when it is freed; -1: it outlives the step.
        freed_after: int64[m], how many requests that op has made by then.
    """

    table: Table
    load_bytes: int
    output_bytes: int
    peak_bytes: int
    freed_in: Int32
    freed_after: Int64


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
        >>> index, size, freed_at = np.arange(2, dtype=np.int32), np.array([100, 50]), np.array([1, 2])
        >>> recorded = Allocations(ids, index, size, ids, freed_at, np.array([4096, 4096]))
        >>> arranged = arrange(recorded, 1, 64, 1.0, 0)
        >>> arranged.load_bytes, arranged.peak_bytes, arranged.table.offsets.tolist()
        (128, 128, [0, 0])
    """
    size = rounded_up(recorded.num_bytes, alignment)
    offsets = np.full(len(size), -1, dtype=np.int64)
    dies = np.flatnonzero(recorded.freed_at >= 0)
    arena_bytes = load_bytes = 0
    if len(dies):
        options = LayoutOptions(alignment=alignment, seed=seed)
        lower, upper = dies.astype(np.int64), recorded.freed_at[dies]
        found = place(lower, upper, size[dies], options, time_limit, progress)
        offsets[dies], arena_bytes, load_bytes = found.offsets, found.height_bytes, found.load_bytes
    by_op = np.lexsort((recorded.index, recorded.op))
    op_offset = np.zeros(num_ops + 1, dtype=np.int64)
    np.cumsum(np.bincount(recorded.op, minlength=num_ops), out=op_offset[1:])
    table = Table(arena_bytes, op_offset, recorded.num_bytes[by_op], offsets[by_op], alignment)
    gone = np.bincount(recorded.freed_at[dies], weights=size[dies], minlength=len(size) + 1).astype(np.int64)
    live = np.cumsum(size) - np.cumsum(gone[: len(size)])
    start = np.zeros(num_ops, dtype=np.int64)  # requests that were made before those of an op
    first = np.flatnonzero(np.diff(recorded.op, prepend=-1))
    start[recorded.op[first]] = first
    freed_after = np.where(recorded.freed_at < 0, 0, recorded.freed_at - start[recorded.freed_in])
    freed_after *= op_offset[recorded.freed_in + 1] > op_offset[recorded.freed_in]  # others have no start
    output_bytes, peak_bytes = int(size.sum() - size[dies].sum()), int(live.max(initial=0))
    return Arranged(table, load_bytes, output_bytes, peak_bytes, recorded.freed_in[by_op], freed_after[by_op])


def arrange_known(graph: Graph, plan: Plan, alignment: int) -> Table:
    """Lay out a step that was never run, from its graph: its tensors, without workspaces."""
    known = Requests.of_graph(graph).in_order(graph, plan.order)
    return arrange(known, graph.num_ops, alignment, 0.0, plan.options["seed"]).table


def planned_again(graph: Graph, before: Plan, progress: Progress | None = None, *, search: bool = True) -> Plan:
    """Plan a step whose workspaces have become known; its order changes only if a better one was found.

    The order of a plan that swaps stays: its copies were chosen for it.

    Args:
        graph: the step with workspaces.
        before: its plan without them; their lower bound still holds.
        progress: see olla.plan.
        search: whether another order is looked for; the figures are those of the workspaces in any case.
    """
    options = {name: before.options[name] for name in ("seed", "updates_may_move")}
    kept = plan(graph, order=before.order, layout=False, time_limit=0.0, **options)
    bound = max(kept.lower_bound_bytes, before.lower_bound_bytes)
    if search and kept.peak_bytes > bound and before.swapped is None:
        limit = before.options["time_limit"]
        found = plan(graph, layout=False, time_limit=limit, progress=progress, **options)
        if found.peak_bytes < kept.peak_bytes:
            return found
        bound = max(bound, found.lower_bound_bytes)
    status = Status.OPTIMAL if kept.peak_bytes == bound else Status.FEASIBLE
    return dataclasses.replace(
        kept,
        lower_bound_bytes=bound,
        status=status,
        message=status.message,
        method=before.method,
        options=before.options,
    )


def program_peak(graph: Graph, alignment: int) -> int:
    """Return the peak of the program order in bytes, with sizes rounded up to the alignment."""
    return with_rounded_sizes(graph, alignment).program_peak_bytes


def with_rounded_sizes(graph: Graph, alignment: int) -> Graph:
    """Return a graph whose ops write tensors of sizes that are rounded up to the alignment."""
    sizes = graph.tensor_bytes.copy()
    written = graph.writes.item
    sizes[written] = rounded_up(sizes[written], alignment)
    return dataclasses.replace(graph, tensor_bytes=sizes)


def trim(device: str) -> None:
    """Give back what the recorded step took and left free: glibc, or torch's allocator, would keep it beside the arena.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
