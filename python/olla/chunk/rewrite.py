"""A linear layer and its cross-entropy in chunks of rows: the logits of one chunk at a time are in memory.

Every chunk computes its logits, its part of the loss and at once the gradient of its logits, and adds that to the
gradients of weight and bias. This is a rewriting of the graph before any search, and changes rounding: sums over rows
are added chunk by chunk. The gradient of the loss must be known before the loss, as it is wherever the step begins its
backward pass with ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import numpy as np

from olla import _core
from olla.chunk.losses import NONE, OPS, LossRegion, regions
from olla.graph import Graph, Lists, operator
from olla.plan import Chunked
from olla.plan.chunks import Part

LEAST_SHARE = 0.001  # of the program's peak: smaller logits are left alone
SHAPE_ONLY = frozenset({"aten.ones_like", "aten.zeros_like", "aten.full_like"})  # they read no element of their input
_RUNS = {"COUNT": "", "ROWS": "", "MEAN": "", "PROBS": "aten.exp.default", "LOGITS_GRAD": "aten.scatter_add_.default"}


def chunked(graph: Graph, num_chunks: int, suits: Callable[[LossRegion], bool] | None = None) -> Chunked:
    """Return the graph with its large losses in chunks.

    Args:
        graph: a training step.
        num_chunks: chunks of rows per loss, at least 1.
        suits: whether a loss may be chunked, where the graph alone does not say so.

    Returns:
        The graph and its origins; with no loss, the graph as it was, where none is found or all logits are small. What
        the chunks add to the time of a step is not estimated here.

    Complexity:
        O(graph * losses).

    Example:
        >>> builder = Graph.builder("no loss")
        >>> chunked(builder.build(), 8).num_losses
        0
    """
    ids = np.arange(graph.num_ops, dtype=np.int32)
    found = _chunked(graph, num_chunks, ((v, Part.WHOLE, NONE, NONE) for v in ids.tolist()))
    least = LEAST_SHARE * _core.profile(graph.core, ids).peak_bytes
    for region in regions(graph):
        is_large = graph.tensor_bytes[graph.writes.of(region.linear)[0]] >= max(least, 1)
        if is_large and (suits is None or suits(region)):
            found = _apply(found, region) or found
    return found


def _apply(before: Chunked, region: LossRegion) -> Chunked | None:
    """Chunk one more loss, whose ids are those of the original; None where its scale depends on the loss itself."""
    place = {int(v): i for i, v in enumerate(before.origin) if before.part[i] == Part.WHOLE}
    region = replace(region, **{name: place.get(getattr(region, name), NONE) for name in OPS})
    graph = before.graph
    content = graph.to_dict()
    _free_of_the_loss(graph, region, content["ops"])
    order = _order(Graph.from_dict(content), region)
    if order is None:
        return None
    writer = _ChunkWriter(content, region, min(before.num_chunks, region.num_rows))
    rows, columns = [], []
    for i in order:
        if i == region.linear:
            for row, stands_for, part, chunk in writer.rows():
                rows.append(row)
                columns.append((before.origin[stands_for], part, before.num_losses, chunk))
        else:
            rows.append(content["ops"][i])
            columns.append((before.origin[i], before.part[i], before.loss[i], before.chunk[i]))
    new_place = {place[v]: i for i, (v, part, *_) in enumerate(columns) if part == Part.WHOLE}
    for row in rows:
        if row.get("after"):
            row["after"] = [new_place[u] for u in row["after"]]
    return _chunked(Graph.from_dict({**content, "ops": rows}), before.num_chunks, columns)


def _chunked(graph: Graph, num_chunks: int, columns: Iterable[Sequence[Any]]) -> Chunked:
    """Return a graph in chunks; columns: origin, part, loss and chunk of every op."""
    origin, part, loss, chunk = np.array(list(columns), dtype=np.int32).reshape(-1, 4).T.copy()
    return Chunked(
        graph=graph,
        num_chunks=num_chunks,
        origin=origin,
        added_seconds=0.0,
        part=part.astype(np.uint8),
        loss=loss,
        chunk=chunk,
    )


def _free_of_the_loss(graph: Graph, region: LossRegion, rows: list[dict[str, Any]]) -> None:
    """Take away what the scale's ancestors read for its shape only: the loss, which is not known yet."""
    pending, seen = [region.scale], set()
    while pending:
        v = int(graph.writer[pending.pop()])
        if v == NONE or v in seen:
            continue
        seen.add(v)
        if operator(graph.targets[v]) in SHAPE_ONLY:
            rows[v] = {**rows[v], "reads": []}
        else:
            pending += graph.reads.of(v).tolist()


def _order(graph: Graph, region: LossRegion) -> list[int] | None:
    """Return the ops in program order as far as possible, the region at its first op; None: it waits for itself."""
    ops, sorter = set(region.ops), TopologicalSorter[int]()
    node = [region.linear if v in ops else v for v in range(graph.num_ops)]
    for v, before in enumerate(Lists(*graph.core.precedences()).to_lists()):
        sorter.add(node[v], *{node[u] for u in before} - {node[v]})
    try:
        sorter.prepare()
    except CycleError:
        return None
    ready, order = list[int](), list[int]()
    while sorter.is_active():
        for v in sorter.get_ready():
            heapq.heappush(ready, v)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


class _ChunkWriter:
    """The rows of a graph file for one loss in chunks."""

    def __init__(self, content: dict[str, Any], region: LossRegion, num_chunks: int) -> None:
        self.tensors: list[dict[str, Any]] = content["tensors"]
        self.ops: list[dict[str, Any]] = content["ops"]
        self.region = region
        self.num_chunks = num_chunks
        self.first = [c * region.num_rows // num_chunks for c in range(num_chunks + 1)]  # row of each chunk

    def rows(self) -> Iterator[tuple[dict[str, Any], int, Part, int]]:
        """Yield (op, op of the graph it stands for, part, chunk)."""
        r = self.region
        through, grad = self._result(r.loss_grad), self._result(r.logits_grad)
        loss, total = self.ops[r.loss]["writes"]
        number_bytes = self.tensors[loss]["bytes"]
        target_bytes = self.tensors[r.target]["bytes"]
        rest = {name: self.ops[v] for name, v in vars(r).items() if name.endswith("_grad") and v != NONE}
        logits, probs, grads = (self._chunk_tensors(v) for v in (r.linear, r.log_softmax, r.logits_grad))
        sums = [self._new_tensor(number_bytes) for _ in logits]
        classes = self._new_tensor(target_bytes)
        self.tensors[through] = {**self.tensors[through], "bytes": number_bytes * r.num_rows}

        yield self._once(r.loss, Part.COUNT, [r.target], [total], launches=3, workspace_bytes=r.num_rows)
        of_rows = [r.target, total, r.scale]
        yield self._once(r.loss_grad, Part.ROWS, of_rows, [through, classes], launches=4, workspace_bytes=r.num_rows)
        for c in range(self.num_chunks):
            yield self._chunk(r.linear, Part.LOGITS, c, self.ops[r.linear]["reads"], [logits[c]])
            yield self._chunk(r.log_softmax, Part.LOG_PROBS, c, [logits[c]], [probs[c]])
            yield self._chunk(r.loss, Part.LOSS, c, [r.target, probs[c]], [sums[c]])
            yield self._chunk(r.logits_grad, Part.PROBS, c, [probs[c]], [grads[c]])
            yield self._chunk(r.logits_grad, Part.LOGITS_GRAD, c, [classes], [], mutates=[grads[c]])
            for part in (Part.WEIGHT_GRAD, Part.BIAS_GRAD, Part.INPUT_GRAD):
                if op := rest.get(part.name.lower()):
                    reads = [t for t in op["reads"] if t != grad] + [grads[c], through]
                    yield self._chunk(getattr(r, part.name.lower()), part, c, reads, op["writes"])
        yield self._once(r.loss, Part.MEAN, [*sums, total], [loss], launches=3, workspace_bytes=0)

    def _once(
        self, v: int, part: Part, reads: list[int], writes: list[int], *, launches: int, workspace_bytes: int
    ) -> tuple[dict[str, Any], int, Part, int]:
        moved = self._num_bytes([*reads, *writes])
        costs = {"flops": 0, "moved_bytes": moved, "launches": launches, "workspace_bytes": workspace_bytes}
        return self._op(v, part, "", {"reads": reads, "writes": writes, "shape": [], **costs}), v, part, NONE

    def _chunk(
        self, v: int, part: Part, c: int, reads: list[int], writes: list[int], mutates: Sequence[int] = ()
    ) -> tuple[dict[str, Any], int, Part, int]:
        """Return the chunk of an op. What belongs to all rows is read whole by every chunk, or added to."""
        op = self.ops[v]
        share = (self.first[c + 1] - self.first[c]) / self.region.num_rows
        own = part not in (Part.PROBS, Part.LOGITS_GRAD)  # these are other operators
        chunk: dict[str, Any] = {"reads": reads, "writes": writes, "mutates": list(mutates), "launches": 1}
        moved, scaled = op.get("moved_bytes", 0), 0
        if part in (Part.LOGITS, Part.INPUT_GRAD):
            by_rows = (self.region.input, self._result(self.region.logits_grad))
            whole = min(moved, self._num_bytes([t for t in op["reads"] if t not in by_rows]))  # weight and bias
            chunk["moved_bytes"] = round(share * (moved - whole)) + whole
        elif part in (Part.WEIGHT_GRAD, Part.BIAS_GRAD):
            whole = min(moved, self._num_bytes(op["writes"]))
            chunk["moved_bytes"] = round(share * (moved - whole)) + (whole if c == 0 else 2 * whole)
        elif part == Part.PROBS:
            chunk["moved_bytes"] = self._num_bytes([*reads, *writes])
        elif part == Part.LOGITS_GRAD:
            chunk["moved_bytes"] = round(share * self._num_bytes(reads))
        else:
            chunk["moved_bytes"] = round(share * moved)
        if part in (Part.WEIGHT_GRAD, Part.INPUT_GRAD):  # input or its gradient is scaled by rows
            scaled = round(share * self._num_bytes(self.ops[self.region.input_grad]["writes"]))
            chunk["moved_bytes"] += 2 * scaled
            chunk["launches"] = 2
        if c > 0 and part in (Part.WEIGHT_GRAD, Part.BIAS_GRAD, Part.INPUT_GRAD):
            chunk |= {"writes": [], "mutates": writes}
        chunk["flops"] = round(share * op.get("flops", 0)) if own else 0
        chunk["workspace_bytes"] = round(share * op.get("workspace_bytes", 0))
        chunk["workspace_bytes"] += scaled if part == Part.WEIGHT_GRAD else 0
        if part not in (Part.LOSS, Part.WEIGHT_GRAD, Part.BIAS_GRAD):
            chunk["shape"] = [self.first[c + 1] - self.first[c], *op["shape"][1:]]
        if seconds := op.get("seconds", 0.0):
            chunk["seconds"] = seconds * max(share * own, chunk["moved_bytes"] / moved if moved else 0.0)
        return self._op(v, part, f" {c + 1}/{self.num_chunks}", chunk), v, part, c

    def _op(self, v: int, part: Part, which: str, changed: dict[str, Any]) -> dict[str, Any]:
        op = self.ops[v]
        name = f"{op.get('name', '')} [{part.name.lower().replace('_', ' ')}{which}]"
        target = _RUNS.get(part.name, op.get("target", ""))
        fixed = {"name": name, "target": target, "recomputable": False, "reads": sorted(set(changed["reads"]))}
        return {**op, "seconds": 0.0, "mutates": [], **changed, **fixed}

    def _num_bytes(self, tensors: Sequence[int]) -> int:
        return sum(self.tensors[t]["bytes"] for t in tensors)

    def _result(self, v: int) -> int:
        (tensor,) = self.ops[v]["writes"]
        return int(tensor)

    def _chunk_tensors(self, v: int) -> list[int]:
        """Return one tensor per chunk for the result of an op: its own, cut to the first chunk, and new ones."""
        whole, num_rows = self._result(v), self.region.num_rows
        num_bytes = self.tensors[whole]["bytes"]
        ends = [num_bytes * row // num_rows for row in self.first]
        sizes = [end - begin for begin, end in pairwise(ends)]
        self.tensors[whole] = {**self.tensors[whole], "bytes": sizes[0]}
        return [whole, *(self._new_tensor(size) for size in sizes[1:])]

    def _new_tensor(self, num_bytes: int) -> int:
        self.tensors.append({"bytes": num_bytes})
        return len(self.tensors) - 1
