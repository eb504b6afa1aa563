"""MODeL: OLLA's split with the devices that make its programs small.

Control edges force weight updates early and generators late; the longest nested tensors are placed before the address
program runs; sizes count units of their common divisor.

Source: Steiner et al., MODeL, ICML 2023, sections on scaling; OLLA (arXiv 2210.12924), functions 1 to 3.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla._core import CoreGraph
from olla.graph import Graph, nearest_order
from olla.layout import ArenaBuffers, Placement
from olla.methods.addresses import solve_addresses
from olla.methods.ilp import BOUND_SHARE, solve_order
from olla.methods.segments import Links, links_of
from olla.order import Answer, Problem
from olla.order.search import OrderSearch

_MAX_LATE_EDGES = 1_000_000  # an op may have many generators and many other predecessors: further pairs are left out

Int64Array = NDArray[np.int64]
Ids = NDArray[np.int32]


def solve(problem: Problem) -> Answer:
    """Solve the order program under the control edges, preplace the pyramid, solve the address program for the rest.

    The edges forbid orders, so the bound is that of the minimum cuts alone, which hold for every order.

    Raises:
        SolverError: HiGHS is missing or failed, or its answer does not hold.
    """
    edges = control_edges(problem.graph, problem.core)
    core = problem.core.constrained(edges.before, edges.after)
    free = OrderSearch(problem)
    with free.stage("bound"):
        free.raise_bound(BOUND_SHARE * free.left())
    search = OrderSearch(problem._replace(core=core, order=nearest_order(core, problem.order)))
    search.bound, search.interrupted = free.bound, free.interrupted
    solve_order(search)
    free.order = search.order
    with search.stage("bound"):
        free.raise_bound(BOUND_SHARE * search.left())
    search.bound = free.bound
    search.interrupted |= free.interrupted
    search.details.append(f"control edges: {edges.num_early} for early updates, {edges.num_late} for late generators")
    if search.peak > free.peak:
        search.order, search.peak = problem.order, free.peak
        search.note = "The control edges allow no order as good as the one to start from, which was kept."
    placement: Placement | None = None
    if problem.options.layout:
        buffers = ArenaBuffers(problem.graph, problem.core, search.order, problem.options.alignment)
        fixed = pyramid(buffers.lower, buffers.upper, buffers.size)
        search.details.append(f"pyramid: {np.count_nonzero(fixed >= 0)} of {len(fixed)} buffers preplaced")
        placement = buffers.placed(solve_addresses(search, buffers, fixed=fixed))
    return search.answer(placement)


class ControlEdges(NamedTuple):
    """Precedences (before[i], after[i]); the first num_early force updates early, num_late more generators late."""

    before: Ids
    after: Ids
    num_early: int
    num_late: int


def control_edges(graph: Graph, core: CoreGraph) -> ControlEdges:
    """Return the edges that force weight updates early and generators of tensors late.

    The level of an op is the length of the longest chain of ops before it; that of a generator, an op that reads and
    waits for nothing, is just below its first user's. An update runs before the first op of program order on
    the next higher level that is neither. A generator runs after what its first users wait for, as far as that is on a
    lower level than itself. All edges lead to higher levels, so they close no cycle.

    Args:
        graph: the training step.
        core: its core graph, extra precedences included.

    Complexity:
        O(num_ops log num_ops + dependencies).
    """
    num_ops = core.num_ops
    preds, succs = links_of(core)
    level = [0] * num_ops
    for v in nearest_order(core, np.arange(num_ops, dtype=np.int32)).tolist():
        level[v] = max((level[u] + 1 for u in preds[v]), default=0)
    is_generator = [
        not preds[v] and bool(succs[v]) and len(graph.reads.of(v)) == 0 and len(graph.writes.of(v)) > 0
        for v in range(num_ops)
    ]
    for v in range(num_ops):
        if is_generator[v]:
            level[v] = min(level[w] for w in succs[v]) - 1
    is_update = [kind == "update" for kind in graph.op_kinds]

    anchors: dict[int, int] = {}  # level -> the first op on it that is neither update nor generator
    for v in range(num_ops):
        if not is_update[v] and not is_generator[v]:
            anchors.setdefault(level[v], v)
    levels = sorted(anchors)
    next_above = [bisect.bisect_right(levels, level[v]) for v in range(num_ops)]
    early = [(v, anchors[levels[i]]) for v, i in enumerate(next_above) if is_update[v] and i < len(levels)]
    late = list(itertools.islice(_late_edges(Links(preds, succs), level, is_generator), _MAX_LATE_EDGES))
    pairs = np.array(early + late, dtype=np.int32).reshape(-1, 2)
    return ControlEdges(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]), len(early), len(late))


def _late_edges(links: Links, level: list[int], is_generator: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield (before, generator): what a generator's first users wait for on lower levels."""

    @functools.cache
    def awaited(user: int) -> list[int]:  # by all generators just below it
        return [p for p in links.preds[user] if level[p] < level[user] - 1]

    for v in np.flatnonzero(is_generator).tolist():
        users = [w for w in links.succs[v] if level[w] == level[v] + 1]
        before = awaited(users[0]) if len(users) == 1 else sorted({p for w in users for p in awaited(w)})
        yield from ((p, v) for p in before)


def pyramid(lower: Int64Array, upper: Int64Array, size: Int64Array) -> Int64Array:
    """Preplace buffers: repeatedly stack the longest one nested in the lifetime of the previous one.

    Args:
        lower: int64[m], first step at which buffer i is alive.
        upper: int64[m], first step at which it no longer is.
        size: int64[m], bytes.

    Returns:
        int64[m], bytes: where buffer i is placed, -1 where it is not. Of equally long ones the largest goes first.

    Complexity:
        O(m log m): one pass over the buffers by falling length of life.

    Example:
        >>> import numpy as np
        >>> pyramid(np.array([0, 1, 2, 0]), np.array([6, 5, 6, 2]), np.array([4, 2, 8, 1])).tolist()
        [0, -1, 4, -1]
    """
    fixed = np.full(len(size), -1, dtype=np.int64)
    first, last, top = -np.inf, np.inf, 0
    for i in np.lexsort((-size, lower - upper)).tolist():
        if first <= lower[i] and upper[i] <= last:
            fixed[i] = top
            first, last, top = lower[i], upper[i], top + int(size[i])
    return fixed
