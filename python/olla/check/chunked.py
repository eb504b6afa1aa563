"""Checks of a graph with losses in chunks. They share no code with what makes it.

Proved: outside of the losses, every op runs once, on the values it had before, and leaves the same. A loss reads what
it read, its own tensors are read by nothing else, its chunks are complete, and each of its results is where the
original has it. Not proved: the arithmetic inside of a loss, which is not the same to the last bit.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from olla.check.values import fail, numbered, residents
from olla.graph import Graph, operator

if TYPE_CHECKING:
    from olla.plan import Chunked

# What an op of each part may stand for, by `olla.plan.chunks.Part`.
_TARGETS = {
    1: ("aten.nll_loss_forward",),
    2: ("aten.nll_loss_backward",),
    3: ("aten.mm", "aten.addmm"),
    4: ("aten._log_softmax",),
    5: ("aten.nll_loss_forward",),
    6: ("aten._log_softmax_backward_data",),
    7: ("aten._log_softmax_backward_data",),
    8: ("aten.mm",),
    9: ("aten.sum",),
    10: ("aten.mm",),
    11: ("aten.nll_loss_forward",),
}
_ONCE = {1, 2, 11}  # the others: once per chunk
_NEEDED = {3, 4, 5, 6, 7, 10}
_CUT = (3, 4, 6)  # each chunk has a tensor of its own
_READ_NOTHING = ("aten.ones_like", "aten.zeros_like", "aten.full_like")  # of their input but its shape


def check_chunked(original: Graph, chunked: Chunked) -> None:
    """Raise PlanError unless a chunked graph is the original but for the inside of its losses.

    Args:
        original: the step as captured.
        chunked: its graph with losses in chunks.

    Raises:
        PlanError: `rule` is "chunked_lengths", "chunked_tensors", "chunked_ops" (one is missing, or there twice),
            "chunked_parts" (a loss is not what its chunks add up to), "chunked_inputs" (an op reads other values),
            "chunked_results" or "chunked_end".

    Complexity:
        O(ops + tensors + uses) of both graphs.
    """
    graph = chunked.graph
    columns = (chunked.origin, chunked.part, chunked.loss, chunked.chunk)
    if any(len(column) != graph.num_ops for column in columns) or graph.num_tensors < original.num_tensors:
        fail("chunked_lengths", "the origins of ops do not fit the chunked graph")
    if len(chunked.origin) and not 0 <= chunked.origin.min() <= chunked.origin.max() < original.num_ops:
        fail("chunked_lengths", f"an origin is not below {original.num_ops}")
    inside = _regions(original, chunked)
    _check_tensors(original, graph, chunked, inside)
    _ChunkCheck(original, chunked, inside).run()


def _regions(original: Graph, chunked: Chunked) -> list[set[int]]:
    """Return the ops of the original that each loss stands for, once its parts are as they must be."""
    own = Counter(chunked.origin[chunked.part == 0].tolist())
    inside: list[set[int]] = [set() for _ in range(chunked.num_losses)]
    parts: list[Counter[tuple[int, int]]] = [Counter() for _ in inside]
    for i in np.flatnonzero(chunked.part).tolist():
        v, part, loss = int(chunked.origin[i]), int(chunked.part[i]), int(chunked.loss[i])
        if part not in _TARGETS or not 0 <= loss < len(inside) or operator(original.targets[v]) not in _TARGETS[part]:
            fail("chunked_parts", f"op {i} is no part of a loss that op {v} can be", i, v)
        inside[loss].add(v)
        parts[loss][part, int(chunked.chunk[i])] += 1
    if np.any((chunked.loss >= 0) != (chunked.part > 0)):
        fail("chunked_parts", "an op belongs to a loss, but is no part of one")
    for found in parts:
        num_chunks = max((chunk for _, chunk in found), default=-1) + 1
        chunks = set(range(num_chunks))
        kinds = {part for part, _ in found}
        complete = all(
            {c for p, c in found if p == part} == ({-1} if part in _ONCE else chunks)
            for part in kinds | _NEEDED | _ONCE
        )
        if not complete or set(found.values()) != {1}:
            fail("chunked_parts", "a loss lacks a part of one of its chunks, or has it twice")
    expected = Counter(v for v in range(original.num_ops) if not any(v in region for region in inside))
    if own != expected:
        v = next(iter((own - expected) | (expected - own)))
        fail("chunked_ops", f"op {v} of the original runs {own[v]} times outside of losses", v)
    return inside


def _check_tensors(original: Graph, graph: Graph, chunked: Chunked, inside: list[set[int]]) -> None:
    """Sizes are those of the original, but for tensors that are cut: their chunks add up."""
    cut: dict[int, int] = {}
    for i in np.flatnonzero(np.isin(chunked.part, _CUT)).tolist():
        v = int(chunked.origin[i])
        if len(graph.writes.of(i)) != 1:
            fail("chunked_parts", f"op {i} makes a chunk of op {v}, but writes {len(graph.writes.of(i))} tensors", i, v)
        cut[v] = cut.get(v, 0) + int(graph.tensor_bytes[graph.writes.of(i)[0]])
    for v, num_bytes in cut.items():
        if num_bytes != original.tensor_bytes[original.writes.of(v)[0]]:
            fail("chunked_parts", f"the chunks of op {v} have {num_bytes} bytes in all", v)
    num = original.num_tensors
    same = np.ones(num, dtype=np.bool_)
    for v in {*cut, *chunked.origin[chunked.part == 2].tolist()}:
        same[original.writes.of(v)] = False
    if not np.array_equal(graph.tensor_bytes[:num][same], original.tensor_bytes[same]):
        fail("chunked_tensors", "a tensor has another size than in the original")
    resident = residents(graph)
    if not np.array_equal(residents(original), resident[:num]) or resident[num:].any():
        fail("chunked_tensors", "the chunked graph has other resident tensors than the original")
    if not np.array_equal(original.donated, graph.donated[:num]) or graph.donated[num:].any():
        fail("chunked_tensors", "the chunked graph has other donated tensors than the original")


class _ChunkCheck:
    """Both graphs in program order; a tensor holds a value, known by what makes it. Inside of loss j: -1 - j."""

    def __init__(self, original: Graph, chunked: Chunked, inside: list[set[int]]) -> None:
        self.original, self.chunked, self.inside = original, chunked, inside
        self.region = {v: j for j, ops in enumerate(inside) for v in ops}
        self.place = {int(v): i for i, v in enumerate(chunked.origin) if chunked.part[i] == 0}
        self.inputs, self.results, self.final = numbered(original)
        self.outside, self.kept = self._borders()
        self.left = Counter(chunked.loss[chunked.loss >= 0].tolist())
        self.held = np.full(chunked.graph.num_tensors, -1 - len(inside), dtype=np.int64)
        resident = np.flatnonzero(residents(chunked.graph))
        self.held[resident] = resident

    def _borders(self) -> tuple[list[set[int]], list[dict[int, int]]]:
        """Return, per loss: the values it reads from outside; tensor -> value that it leaves to others."""
        made = [{x for v in ops for x in self.results[v].values()} for ops in self.inside]
        outside = [{x for v in ops for x in self.inputs[v]} - made[j] for j, ops in enumerate(self.inside)]
        used = set(self.final[self.original.outputs].tolist())
        for v in range(self.original.num_ops):
            j = self.region.get(v, -1)
            used |= set(self.inputs[v]) - (made[j] if j >= 0 else set())
        kept = [{t: x for v in ops for t, x in self.results[v].items() if x in used} for ops in self.inside]
        return outside, kept

    def run(self) -> None:
        graph, chunked = self.chunked.graph, self.chunked
        for i in range(graph.num_ops):
            tensors = np.concatenate((graph.reads.of(i), graph.mutates.of(i)))
            seen, loss = set(self.held[tensors].tolist()), int(chunked.loss[i])
            if loss >= 0:
                self._part(i, loss, seen)
            else:
                self._whole(i, int(chunked.origin[i]), seen)
        drawn = chunked.origin[graph.random]
        if np.any(np.diff(drawn) <= 0):
            fail("chunked_inputs", "random ops left their program order")
        if not np.array_equal(graph.outputs, self.original.outputs):
            fail("chunked_end", "the chunked graph has other outputs than the original")
        lasting = np.union1d(self.original.outputs, np.flatnonzero(residents(self.original)))
        wrong = lasting[self.held[lasting] != self.final[lasting]]
        if len(wrong):
            fail("chunked_end", f"tensor {wrong[0]} ends with another value than in the original", int(wrong[0]))

    def _whole(self, i: int, v: int, seen: set[int]) -> None:
        graph, original = self.chunked.graph, self.original
        free = operator(original.targets[v]) in _READ_NOTHING and not seen
        if seen != set(self.inputs[v]) and not free:
            fail("chunked_inputs", f"op {i} stands for op {v}, but reads other values than that op", i, v)
        lists = ((graph.writes, original.writes), (graph.mutates, original.mutates))
        if any(ours.of(i).tolist() != theirs.of(v).tolist() for ours, theirs in lists):
            fail("chunked_results", f"op {i} stands for op {v}, but writes other tensors", i, v)
        same = graph.random[i] == original.random[v] and graph.targets[i] == original.targets[v]
        if not same or graph.workspace_bytes[i] != original.workspace_bytes[v]:
            fail("chunked_results", f"op {i} stands for op {v}, but is another operator", i, v)
        if not {self.place.get(u, -1) for u in original.after.of(v).tolist()} <= set(graph.after.of(i).tolist()):
            fail("chunked_inputs", f"op {i} stands for op {v}, but does not wait for the ops that op waits for", i, v)
        for t, value in self.results[v].items():
            self.held[t] = value

    def _part(self, i: int, loss: int, seen: set[int]) -> None:
        own = -1 - loss
        changed = self.chunked.graph.mutates.of(i)
        if not seen <= self.outside[loss] | {own} or np.any(self.held[changed] != own):
            fail("chunked_inputs", f"op {i} of a loss reads or changes what its loss does not", i)
        for t in self.chunked.graph.writes.of(i).tolist():
            self.held[t] = own
        self.left[loss] -= 1
        if self.left[loss] == 0:
            for t, value in self.kept[loss].items():
                if self.held[t] != own:
                    fail("chunked_results", f"tensor {t} is a result of a loss that its chunks do not make", t)
                self.held[t] = value
