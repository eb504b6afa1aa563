"""ROAM: divide and conquer at narrow waists, exact leaves, activations at the bottom of the arena.

Source: Shu et al., ROAM (arXiv 2310.19295).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla._core import CoreGraph, Limits, profile
from olla._core import order as best_order
from olla.graph import Graph
from olla.graph.columns import lists_of
from olla.layout import ArenaBuffers, LayoutOptions, Placement, place
from olla.methods.ilp import BOUND_SHARE
from olla.methods.segments import assigned, links_of, merged, spine_of
from olla.order import Answer, Problem
from olla.order.search import OrderSearch

_LEAF_OPS = 100  # small enough for the exact search
_MAX_LEAVES = 100  # larger graphs get larger leaves


class _Leaf(NamedTuple):
    """Steps [lo, hi) of the order, ordered on their own."""

    lo: int
    hi: int
    peak: int
    bound: int  # for these ops at this place

    @property
    def status(self) -> str:
        return "optimal" if self.peak == self.bound else "feasible"


class _Divided(NamedTuple):
    """An order made leaf by leaf."""

    order: NDArray[np.int32]
    leaves: list[_Leaf]

    @property
    def peak(self) -> int:
        return max(leaf.peak for leaf in self.leaves)

    @property
    def leaf_of_step(self) -> NDArray[np.int64]:
        """int64[num_ops]: the leaf that step i belongs to."""
        return np.repeat(np.arange(len(self.leaves)), [leaf.hi - leaf.lo for leaf in self.leaves])


def solve(problem: Problem) -> Answer:
    """Cut, assign what hangs off the spine, order every leaf; lay out what crosses leaves, then every leaf."""
    if problem.graph.num_ops == 0:
        return Answer(problem.order)
    search = OrderSearch(problem)
    with search.stage("bound"):
        search.raise_bound(BOUND_SHARE * search.left())
    best: _Divided | None = None
    with search.stage("order"):
        best = _ordered(search)
    if best is None:  # interrupted
        return search.answer()
    search.order = best.order
    search.details = _order_details(problem, best)
    num_optimal = sum(leaf.status == "optimal" for leaf in best.leaves)
    search.note = f"{len(best.leaves)} segments, {num_optimal} of them ordered optimally."
    placement: Placement | None = None
    if problem.options.layout:
        with search.stage("layout"):
            arena = _ArenaOfLeaves(problem, search, best)
            placement = arena.buffers.placed(arena.places())
            search.details += arena.details
    return search.answer(placement)


def _ordered(search: OrderSearch) -> _Divided:
    """Order with hanging ops as early as can be, then with those late that would raise the peak above its bound."""
    problem = search.problem
    graph, order = problem.graph, problem.order.tolist()
    links = links_of(problem.core)
    spine = spine_of(graph, links, order)
    most = max(_LEAF_OPS, graph.num_ops // _MAX_LEAVES)
    best: _Divided | None = None
    for target in (math.inf, float(search.bound)):
        leaves = merged(assigned(graph, links, spine, order, target), most)
        divided = _leaves_ordered(search, leaves, 0.5 if best is None else 1.0)
        if best is None or divided.peak < best.peak:
            best = divided
        if best.peak == search.bound or search.interrupted:
            break
    if best is None or best.peak > search.peak:  # the graph has no waists to speak of: cut the order it came with
        leaves = [order[lo : lo + most] for lo in range(0, len(order), most)]
        best = _leaves_ordered(search, leaves, 1.0)
    return best


def _leaves_ordered(search: OrderSearch, leaves: list[list[int]], share: float) -> _Divided:
    """Order every leaf on its own; each gets its part of a share of the time left, and what those before it left."""
    problem = search.problem
    order = np.array([v for leaf in leaves for v in leaf], dtype=np.int32)
    unused = (1.0 - share) * search.left()
    done, lo = [], 0
    for k, leaf in enumerate(leaves):
        hi = lo + len(leaf)
        inside = window_graph(problem.graph, problem.core, order, lo, hi)
        limit = max(0.0, search.left() - unused) / (len(leaves) - k)
        start = np.arange(hi - lo, dtype=np.int32)
        limits = Limits(time_limit=limit, max_work=None, progress=problem.progress)
        found = best_order(inside, [start], problem.options.seed, limits)
        search.interrupted |= found.cancelled
        order[lo:hi] = order[lo:hi][found.order]
        done.append(_Leaf(lo, hi, found.peak_bytes, found.lower_bound_bytes))
        lo = hi
    return _Divided(order, done)


def window_graph(graph: Graph, core: CoreGraph, order: NDArray[np.int32], lo: int, hi: int) -> CoreGraph:
    """Cut the steps [lo, hi) out of an order.

    Args:
        graph: the training step.
        core: its core graph, extra precedences included.
        order: int32[num_ops], a valid order.
        lo: first step of the window.
        hi: step after its last one, above lo.

    Returns:
        A graph whose op i is the op at step lo + i. What is live throughout the window is one resident tensor of it;
        what dies inside is donated, what is needed later is an output. Any order of it can replace those steps, and
        its live bytes are those of the whole order.

    Complexity:
        O(num_tensors + num_ops + dependencies), plus the lists of the window's ops.
    """
    lives = profile(core, order)
    first, last = lives.first, lives.last
    position = np.full(graph.num_ops, -1, dtype=np.int64)
    position[order[lo:hi]] = np.arange(hi - lo)
    offset, preds = core.precedences()

    local: dict[int, int] = {}  # tensor -> its id in the window
    reads, writes, after = [], [], []
    for op in order[lo:hi].tolist():
        used = np.union1d(graph.reads.of(op), graph.mutates.of(op)).tolist()
        reads.append([local.setdefault(t, len(local)) for t in used])
        writes.append([local.setdefault(t, len(local)) for t in np.unique(graph.writes.of(op)).tolist()])
        before = position[preds[offset[op] : offset[op + 1]]]
        after.append(before[before >= 0].tolist())

    tensors = np.fromiter(local, dtype=np.int64, count=len(local))
    written_inside = np.zeros(len(local), dtype=np.bool_)
    written_inside[[t for row in writes for t in row]] = True
    planned = graph.donated[tensors] | (graph.writer[tensors] >= 0)
    needed_later = np.isin(tensors, graph.outputs) | (last[tensors] > hi)
    throughout = (first <= lo) & (last >= hi)
    throughout[tensors] = False

    return CoreGraph(
        tensor_bytes=np.append(graph.tensor_bytes[tensors], graph.tensor_bytes[throughout].sum()).astype(np.int64),
        donated=np.append(planned & ~written_inside & ~needed_later, False).astype(np.uint8),
        reads=lists_of(reads),
        writes=lists_of(writes),
        mutates=lists_of([[]] * (hi - lo)),
        after=lists_of(after),
        workspace_bytes=graph.workspace_bytes[order[lo:hi]],
        random=np.zeros(hi - lo, dtype=np.uint8),
        outputs=np.flatnonzero(written_inside & needed_later).astype(np.int32),
    )


def _order_details(problem: Problem, divided: _Divided) -> list[str]:
    """Say of every leaf what it is, which leaf it is paired with, and how well it is ordered."""
    kinds = [
        _kind(Counter(problem.graph.op_kinds[v] for v in divided.order[leaf.lo : leaf.hi])) for leaf in divided.leaves
    ]
    partner = _pairs(problem, divided, kinds)
    lines = []
    for k, leaf in enumerate(divided.leaves):
        pair = f", pair of {partner[k]}" if k in partner else ""
        lines.append(
            f"segment {k}: {kinds[k]}, steps {leaf.lo} to {leaf.hi - 1}{pair}: order {leaf.status}, "
            f"peak {leaf.peak} bytes, bound {leaf.bound}"
        )
    return lines


def _kind(counts: Counter[str]) -> str:
    """Name a leaf by the most frequent kind of its ops; updates, which run wherever they fit, only where alone."""
    without_updates = counts if set(counts) == {"update"} else counts - Counter(update=counts["update"])
    return without_updates.most_common(1)[0][0]


def _pairs(problem: Problem, divided: _Divided, kinds: list[str]) -> dict[int, int]:
    """Pair every forward leaf with the backward leaf where most bytes of its activations die, and the other way."""
    lives = profile(problem.core, divided.order)
    first, last = lives.first, lives.last
    leaf = divided.leaf_of_step
    written = np.unique(problem.graph.writes.item)
    num = len(divided.leaves)
    crossing = np.zeros((num, num), dtype=np.int64)
    np.add.at(crossing, (leaf[first[written]], leaf[last[written] - 1]), problem.graph.tensor_bytes[written])
    backward = np.array([kind == "backward" for kind in kinds])
    partner: dict[int, int] = {}
    for k in range(num):
        bytes_shared = np.where(backward, crossing[k], 0)
        if kinds[k] == "forward" and bytes_shared.max() > 0:
            partner[k] = int(np.argmax(bytes_shared))
            partner.setdefault(partner[k], k)
    return partner


class _ArenaOfLeaves:
    """The layout of an order made leaf by leaf."""

    def __init__(self, problem: Problem, search: OrderSearch, divided: _Divided) -> None:
        self.problem, self.search, self.leaves = problem, search, divided.leaves
        self.buffers = ArenaBuffers(problem.graph, problem.core, divided.order, problem.options.alignment)
        leaf = divided.leaf_of_step
        self.begin, self.end = leaf[self.buffers.lower], leaf[self.buffers.upper - 1]
        crosses = self.begin != self.end
        life = self.buffers.upper - self.buffers.lower
        by_rule = np.lexsort((-self.buffers.size, np.where(crosses, -life, 0))).astype(np.int32)
        self.crossing, self.inside = np.split(by_rule, [np.count_nonzero(crosses)])
        self.details: list[str] = []

    def places(self) -> NDArray[np.int64]:
        """Lay out what crosses leaves from the bottom up, the longest-lived first; then every leaf around that.

        What lives in one leaf goes into the holes, the largest first, where that is lower: time can be short.
        """
        b, ids = self.buffers, self.crossing
        places, height = self._fit(ids)
        enough = max(b.load_bytes(), height)  # no use in a leaf that is lower
        for k, leaf in enumerate(self.leaves):
            inside = self.inside[self.begin[self.inside] == k]
            around = ids[(self.begin[ids] <= k) & (self.end[ids] >= k)]
            places[inside], status, height = self._leaf(k, inside, around, places[around], enough)
            enough = max(enough, height)
            self.details.append(f"segment {k}: layout {status}, {height} bytes, steps {leaf.lo} to {leaf.hi - 1}")
        in_holes, height = self._fit(np.concatenate([ids, self.inside]))
        if height >= np.max(places + b.size, initial=0):
            return places
        self.details.append(f"layout: leaves in the holes between what crosses segments, {height} bytes")
        return in_holes

    def _fit(self, ids: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
        """Place buffers in this order, each as low as it fits; return the places of all buffers, and the height."""
        b, problem = self.buffers, self.problem
        places = np.zeros(len(b.size), dtype=np.int64)
        found = _core.fit_in_order(
            b.lower[ids], b.upper[ids], b.size[ids], np.arange(len(ids), dtype=np.int32), True,
            problem.options.alignment, max(1.0, problem.left(1.0)), problem.progress,
        )  # fmt: skip
        places[ids] = found.offsets
        self.search.interrupted |= found.cancelled
        return places, found.height_bytes

    def _leaf(
        self, k: int, inside: NDArray[np.int32], crossing: NDArray[np.int32], places: NDArray[np.int64], enough: int
    ) -> tuple[NDArray[np.int64], str, int]:
        """Lay out leaf k around what crosses it; return the offsets of what lives in it alone, status and height."""
        b, problem, leaf = self.buffers, self.problem, self.leaves[k]
        both = np.concatenate([inside, crossing])
        fixed = np.concatenate([np.full(len(inside), -1, dtype=np.int64), places])
        limit = self.search.left(1.0) / (len(self.leaves) - k)
        options = LayoutOptions(alignment=problem.options.alignment, seed=problem.options.seed, capacity=enough)
        lower, upper = np.maximum(b.lower[both], leaf.lo), np.minimum(b.upper[both], leaf.hi)
        found = place(lower, upper, b.size[both], options, limit, problem.progress, fixed=fixed)
        self.search.interrupted |= found.cancelled
        height = found.height_bytes
        status = "optimal" if height == found.bound_bytes else "low enough" if height <= enough else "feasible"
        return found.offsets[: len(inside)], status, height
