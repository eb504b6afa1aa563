"""The graph in which swaps are ordinary ops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph
from olla.plan import Swapped, Swaps
from olla.plan.rewrite import COPY

SWAP_OUT, SWAP_IN = "olla::swap_out", "olla::swap_in"
_NUMBERS = ("workspace_bytes", "seconds", "flops", "moved_bytes", "launches", "random", "recomputable")


def swapped_graph(graph: Graph, order: NDArray[np.int32], swaps: Swaps) -> Swapped:
    """Return the graph in which the swaps are ordinary ops; its program order is the order they were chosen for.

    Args:
        graph: the training step.
        order: int32[n], valid.
        swaps: of that order.

    A swap-out reads a tensor and writes a handle of no bytes: the copy in host memory. It stands where the copy has
    ended. A swap-in reads the handle and writes a new tensor, which later ops use; it stands where the copy is issued.
    Both are kept there by `after`. Tensors of the graph keep their ids; handles and new tensors follow.

    A resident tensor that waits in host memory from step to step is its own handle, of no bytes: the swap-in reads it,
    the swap-out changes it.

    Complexity:
        O(graph + swaps).
    """
    n, k = graph.num_ops, len(swaps.tensor)
    outs: list[list[int]] = [[] for _ in range(n + 1)]
    ins: list[list[int]] = [[] for _ in range(n + 1)]
    for i in np.flatnonzero(swaps.last >= 0).tolist():
        outs[swaps.freed[i]].append(i)
    for i in np.lexsort((swaps.next, swaps.issue)).tolist():
        ins[swaps.issue[i]].append(i)
    parts = _Parts(graph, swaps)
    now = list(range(graph.num_tensors))  # id of the tensor that holds what tensor t would
    place: dict[int, int] = {}  # op of the graph -> new position

    def leave(s: int, before: list[int]) -> None:
        for i in outs[s]:
            t = int(swaps.tensor[i])
            lasts = bool(swaps.next[i] == n)
            written, changed = ([], [t]) if lasts else ([parts.handle[i]], [])
            parts.add(COPY, f"swap_out {graph.tensor_names[t] or t}", [now[t]], written, changed, before)
            now[t] = t if lasts else now[t]

    for s, v in enumerate(order.tolist()):
        before = [place[int(order[s - 1])]] if s else []
        leave(s, before)
        issued = []
        for i in ins[s]:
            t = int(swaps.tensor[i])
            now[t] = parts.device[i]
            name = f"swap_in {graph.tensor_names[t] or t}"
            issued.append(parts.add(COPY, name, [parts.handle[i]], [now[t]], [], before))
        after = [place[u] for u in graph.after.of(v).tolist()]
        used, changed = ([now[t] for t in column.of(v).tolist()] for column in (graph.reads, graph.mutates))
        place[v] = parts.add(v, graph.op_names[v], used, graph.writes.of(v).tolist(), changed, after + issued)
    if n and k:
        leave(n, [place[int(order[n - 1])]])
    origin = np.array(parts.origin, dtype=np.int32)
    return Swapped(graph=parts.assemble(now), origin=origin, added_seconds=swaps.stall_seconds, swaps=swaps)


class _Parts:
    """A graph that swaps while it is put together."""

    def __init__(self, graph: Graph, swaps: Swaps) -> None:
        self.graph = graph
        self.origin: list[int] = []
        self.names: list[str] = []
        self.lists: dict[str, list[list[int]]] = {name: [] for name in ("reads", "writes", "mutates", "after")}
        self.tensors: list[tuple[int, str, str]] = []  # bytes, kind and name of those that follow the graph's
        self.handle: dict[int, int] = {}  # of swap i, and the tensor that it brings back
        self.device: dict[int, int] = {}
        self.num_bytes = graph.tensor_bytes.copy()
        for i, t in enumerate(swaps.tensor.tolist()):
            lasts = bool(swaps.last[i] < 0 or swaps.next[i] == graph.num_ops)
            self.handle[i] = t if lasts else self._tensor(0, "temporary", "")
            if lasts:
                self.num_bytes[t] = 0
            if swaps.next[i] < graph.num_ops:
                self.device[i] = self._tensor(int(graph.tensor_bytes[t]), graph.tensor_kinds[t], graph.tensor_names[t])

    def _tensor(self, num_bytes: int, kind: str, name: str) -> int:
        self.tensors.append((num_bytes, kind, name))
        return self.graph.num_tensors + len(self.tensors) - 1

    def add(self, v: int, name: str, reads: list[int], writes: list[int], mutates: list[int], after: list[int]) -> int:
        """Add an op; return its position."""
        for column, items in zip(self.lists.values(), (reads, writes, mutates, after), strict=True):
            column.append(items)
        self.origin.append(v)
        self.names.append(name)
        return len(self.origin) - 1

    def assemble(self, now: list[int]) -> Graph:
        """Return the graph; now: the tensor that holds at the end what tensor t would."""
        graph, origin = self.graph, self.origin
        of = np.array(origin)
        own = of != COPY
        numbers = {}
        for name in (*_NUMBERS, "ranks", "message_bytes"):
            column = getattr(graph, name)
            numbers[name] = np.where(own, column[of], np.zeros(1, dtype=column.dtype)) if graph.num_ops else column
        targets = [
            graph.targets[v] if v != COPY else SWAP_OUT if name.startswith("swap_out ") else SWAP_IN
            for v, name in zip(origin, self.names, strict=True)
        ]
        sizes, kinds, names = zip(*self.tensors, strict=True) if self.tensors else ((), (), ())
        return Graph.from_arrays(
            name=graph.name,
            tensor_bytes=np.concatenate([self.num_bytes, np.array(sizes, dtype=np.int64)]),
            donated=np.concatenate([graph.donated, np.zeros(len(sizes), dtype=np.bool_)]),
            tensor_kinds=[*graph.tensor_kinds, *kinds],
            tensor_names=[*graph.tensor_names, *names],
            op_names=self.names,
            op_kinds=[graph.op_kinds[v] if v != COPY else "other" for v in origin],
            targets=targets,
            shapes=[graph.shapes[v] if v != COPY else () for v in origin],
            collectives=[graph.collectives[v] if v != COPY else "" for v in origin],
            groups=[graph.groups[v] if v != COPY else "" for v in origin],
            outputs=[now[t] for t in graph.outputs.tolist()],
            **self.lists,
            **numbers,
        )
