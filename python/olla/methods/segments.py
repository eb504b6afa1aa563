"""A training step cut at its narrow waists: segments that can be ordered one by one.

The spine is the longest path through forward, loss and backward, and the ops beside it that leave and join it nearby. A
waist is an op of the path that no op of the spine runs beside: all precede or follow it. Segments end at waists. All
other ops float, and are assigned to segments afterwards: what the spine needs from afar (masks, positions, a gradient
that is added up much later), and what hangs off it (gradients of weights, updates).

Source: ROAM (arXiv 2310.19295). There, waists are sought among all ops but updates; but the gradients of weights, which
hang off the backward pass one by one, leave none in it, and one mask that all layers share leaves none in the forward.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from olla._core import CoreGraph
from olla.graph import Lists
from olla.layout import live_bytes
from olla.order.base_orders import bytes_per_op, freed_bytes

if TYPE_CHECKING:
    from olla.graph import Graph

_NEARBY = 64  # ops of the path that an op of the spine may run beside


class Spine(NamedTuple):
    """The part of a graph that is cut at its waists.

    Attributes:
        segment: for op v its segment; -1 where it floats.
        needed: for op v whether the end of the path needs it: then a floating op has a time by which it must run.
        num_segments: segments, one after the other.
    """

    segment: list[int]
    needed: list[bool]
    num_segments: int


class Links(NamedTuple):
    """Direct predecessors and successors of every op."""

    preds: list[list[int]]
    succs: list[list[int]]


def links_of(core: CoreGraph) -> Links:
    """Return the dependencies of a graph as lists."""
    preds = Lists(*core.precedences())
    return Links(preds.to_lists(), preds.inverted(core.num_ops).to_lists())


def spine_of(graph: Graph, links: Links, order: list[int]) -> Spine:
    """Find the spine and cut it at its narrow waists.

    Args:
        graph: the training step, with at least one op.
        links: its dependencies, extra precedences included.
        order: any valid order.

    Returns:
        The segments of the spine.

    Complexity:
        O(ops + dependencies).
    """
    path = _longest_path(graph, links, order)
    place = {v: i for i, v in enumerate(path)}
    after, before = [-1] * graph.num_ops, [len(path)] * graph.num_ops  # op v: the last of the path ahead, first behind
    for v in order:
        after[v] = max((place.get(u, after[u]) for u in links.preds[v]), default=-1)
    for v in reversed(order):
        before[v] = min((place.get(w, before[w]) for w in links.succs[v]), default=len(path))
    needed = [v in place or before[v] < len(path) for v in range(graph.num_ops)]
    beside = [
        v
        for v in range(graph.num_ops)
        if v not in place and after[v] >= 0 and needed[v] and before[v] - after[v] <= _NEARBY
    ]
    first, end = np.array([(after[v] + 1, before[v]) for v in beside], dtype=np.int64).reshape(-1, 2).T
    is_waist = live_bytes(first, end, np.ones_like(first), len(path)) == 0  # no op of the spine runs beside
    is_waist[-1] = True  # the last segment ends where the path ends
    cut = np.concatenate(([0], np.cumsum(is_waist))).tolist()  # waists among the first i ops of the path
    segment = [-1] * graph.num_ops
    for v, i in place.items():
        segment[v] = cut[i]
    for v in beside:
        segment[v] = cut[after[v] + 1]
    return Spine(segment, needed, cut[-1])


def _longest_path(graph: Graph, links: Links, order: list[int]) -> list[int]:
    """Return the ops of a longest path that ends in a backward op (where there are none, in one that is no update)."""
    last_kinds = {"backward"} if "backward" in graph.op_kinds else set(graph.op_kinds) - {"update"}
    ends = [v for v in order if graph.op_kinds[v] in last_kinds] or order
    length = [1] * graph.num_ops
    for v in order:
        length[v] += max((length[u] for u in links.preds[v]), default=0)
    path = [max(ends, key=lambda v: length[v])]
    while links.preds[path[-1]]:
        path.append(max(links.preds[path[-1]], key=lambda u: length[u]))
    return path[::-1]


class _Memory:
    """Bytes live while ops run one after the other."""

    def __init__(self, graph: Graph) -> None:
        self.size = freed_bytes(graph).tolist()
        self.uses = [
            set(graph.reads.of(v).tolist()) | set(graph.mutates.of(v).tolist()) | set(graph.writes.of(v).tolist())
            for v in range(graph.num_ops)
        ]
        self.left = Counter(t for used in self.uses for t in used)
        new_bytes = bytes_per_op(graph, graph.writes)
        self.new_bytes = new_bytes.tolist()
        self.needs = (new_bytes + graph.workspace_bytes).tolist()
        self.live = graph.resident_bytes + int(graph.tensor_bytes[graph.donated].sum())

    def run(self, op: int) -> None:
        self.live += self.new_bytes[op]
        for t in self.uses[op]:
            self.left[t] -= 1
            if self.left[t] == 0:
                self.live -= self.size[t]

    def change(self, op: int) -> int:
        """Return what running the op now would add to the live bytes."""
        freed: int = sum(self.size[t] for t in self.uses[op] if self.left[t] == 1)
        return int(self.new_bytes[op]) - freed


class _Assignment:
    """Ops as they run, segment by segment."""

    def __init__(self, graph: Graph, links: Links, spine: Spine, order: list[int]) -> None:
        self.memory = _Memory(graph)
        self.segments: list[list[int]] = []
        self._links, self._spine = links, spine
        self._waiting = [len(before) for before in links.preds]
        self._place = {v: i for i, v in enumerate(order)}
        self._done = [False] * graph.num_ops
        self.hanging: list[tuple[int, int, int]] = []  # heap of (bytes needed, place, op): can run
        self.needed_later: list[int] = []  # can run
        for v in order:
            self._offer(v)

    def run(self, op: int) -> None:
        """Run an op in the present segment."""
        self._done[op] = True
        self.segments[-1].append(op)
        self.memory.run(op)
        for w in self._links.succs[op]:
            self._waiting[w] -= 1
            self._offer(w)

    def run_with_needs(self, op: int) -> None:
        """Run an op, and before it what it needs."""
        stack = [(op, self._needs(op))]
        while stack:
            top, needs = stack[-1]
            missing = next((u for u in needs if not self._done[u]), None)
            if missing is None:
                self.run(top)
                stack.pop()
            else:
                stack.append((missing, self._needs(missing)))

    def _needs(self, op: int) -> Iterator[int]:
        return iter(sorted((u for u in self._links.preds[op] if not self._done[u]), key=self._place.__getitem__))

    def _offer(self, op: int) -> None:
        if self._waiting[op] > 0 or self._spine.segment[op] >= 0 or self._done[op]:
            return
        if self._spine.needed[op]:
            self.needed_later.append(op)
        else:
            heapq.heappush(self.hanging, (self.memory.needs[op], self._place[op], op))

    def run_hanging(self, target_bytes: float) -> None:
        """Run what hangs off the spine, the smallest first, as long as memory stays within the target."""
        while self.hanging and (self.hanging[0][0] == 0 or self.memory.live + self.hanging[0][0] <= target_bytes):
            self.run(heapq.heappop(self.hanging)[2])

    def run_needed_later(self) -> None:
        """Run ahead of time what takes no more memory than it frees."""
        offered, self.needed_later = self.needed_later, []
        for op in offered:
            if not self._done[op]:
                if self.memory.change(op) <= 0:
                    self.run(op)
                else:
                    self.needed_later.append(op)


def assigned(graph: Graph, links: Links, spine: Spine, order: list[int], target_bytes: float) -> list[list[int]]:
    """Assign the ops that float to segments.

    What the spine needs runs right before its user, or earlier where it takes no more memory than it frees. What hangs
    off the spine runs at the end of the segment in which it can, unless memory would rise above the target: then it
    waits for a later one.

    Args:
        graph: the training step.
        links: its dependencies.
        spine: its segments.
        order: any valid order.
        target_bytes: what memory should not exceed because of ops that hang off the spine.

    Returns:
        The ops of every segment in a valid order; the segments in a row are a valid order of the graph.

    Complexity:
        O((ops + dependencies + uses) log ops), where few ops are needed from afar at a time.
    """
    of_spine: list[list[int]] = [[] for _ in range(spine.num_segments)]
    for v in order:
        if spine.segment[v] >= 0:
            of_spine[spine.segment[v]].append(v)
    assignment = _Assignment(graph, links, spine, order)
    for segment in of_spine:
        assignment.segments.append([])
        for v in segment:
            assignment.run_with_needs(v)
        assignment.run_needed_later()
        assignment.run_hanging(target_bytes)
    assignment.run_hanging(float("inf"))
    return assignment.segments


def merged(segments: list[list[int]], num_ops: int) -> list[list[int]]:
    """Join segments in a row as long as they have no more than so many ops together."""
    leaves: list[list[int]] = []
    for segment in segments:
        if leaves and len(leaves[-1]) + len(segment) <= num_ops:
            leaves[-1] = leaves[-1] + segment
        elif segment:
            leaves.append(segment)
    return leaves
