"""An order that gathers sharded parameters late, from which it is chosen what to keep and what to gather again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from olla.graph import Graph, nearest_order
from olla.graph.collectives import gathers, shard_of

Order = NDArray[np.int32]


def gathered_late(graph: Graph, order: Order) -> Order:
    """Return the order with every parameter gathered, and waited for, right before its first use.

    What changes a shard, such as the decay of weights, comes behind all uses of what is gathered from it. The
    collectives of a group keep their order, so that one may be gathered earlier than it is used: before the next that
    is not gathered, or that is used earlier.

    Args:
        graph: a training step.
        order: int32[num_ops], valid.

    Returns:
        int32[num_ops], valid.

    Complexity:
        O(ops log ops + uses).

    Example:
        >>> b = Graph.builder("one shard of two")
        >>> shard, whole, x, y = b.tensor(8, kind="parameter"), b.tensor(16), b.tensor(16), b.tensor(16)
        >>> talk = {"group": "0", "ranks": 2}
        >>> _ = b.op("gather", reads=[shard], writes=[whole], collective="all_gather", message_bytes=16, **talk)
        >>> _ = b.op("wait", reads=[shard], mutates=[whole], collective="wait", **talk)
        >>> _ = b.op("before", writes=[x]), b.op("use", reads=[whole, x], writes=[y])
        >>> gathered_late(b.build(), np.arange(4, dtype=np.int32)).tolist()
        [2, 0, 1, 3]
    """
    gather = gathers(graph)
    if not gather.any():
        return order
    moves = _Moves(graph, np.argsort(order), gather)
    for v in order[::-1].tolist():
        if graph.collectives[v] not in ("", "wait"):
            moves.gather(v) if gather[v] else moves.stay(v)
    moves.change_later()
    waits = np.array(graph.collectives) == "wait"
    found: Order = np.lexsort((waits, moves.number, moves.place)).astype(np.int32)
    return nearest_order(graph.core, found)


class _Moves:
    """New places of ops: steps of the order, and fractions between two of them."""

    def __init__(self, graph: Graph, at: NDArray[np.int64], gather: NDArray[np.bool_]) -> None:
        self.graph, self.at = graph, at
        self.place = at.astype(np.float64)
        self.number = at.copy()  # who comes first at one place: an op, then what waits for it
        self._limits: dict[str, float] = {}  # group -> place of the collective behind
        self._last: dict[int, int] = {}  # shard -> step of the last use of what is gathered from it
        tensor = np.concatenate([graph.reads.item, graph.mutates.item])
        user = np.concatenate([graph.reads.owner, graph.mutates.owner])
        whole = np.zeros(graph.num_tensors, dtype=np.bool_)
        issues = gather & (np.array(graph.collectives) != "wait")
        whole[graph.writes.item[issues[graph.writes.owner]]] = True
        self._waits = {int(graph.mutates.of(v)[0]): v for v in np.flatnonzero(gather & ~issues).tolist()}
        self._used: dict[int, list[int]] = {}  # step of each use of what is gathered
        mine = whole[tensor] & ~gather[user]
        for t, step in zip(tensor[mine].tolist(), at[user[mine]].tolist(), strict=True):
            self._used.setdefault(t, []).append(step)

    def stay(self, v: int) -> None:
        self._limits[self.graph.groups[v]] = self.place[v]

    def gather(self, v: int) -> None:
        """Move an all-gather, the copy it sends and the wait before the first use and the collective behind."""
        (whole,), group = self.graph.writes.of(v).tolist(), self.graph.groups[v]
        used = self._used.get(whole, [])
        place = min([*used, *([self._limits[group]] if group in self._limits else [])], default=self.at[v] + 0.5) - 0.5
        sent = self.graph.reads.of(v)
        copies = [u for u in self.graph.writer[sent].tolist() if u >= 0]
        moved = [*copies, v, *([self._waits[whole]] if whole in self._waits else [])]
        self.place[moved], self.number[moved] = place, self.at[v]
        self._limits[group] = place + 0.5
        for t in sent.tolist():
            shard = shard_of(self.graph, t)
            self._last[shard] = max([*used, self._last.get(shard, 0)])

    def change_later(self) -> None:
        """Move mutations of a shard behind the last use of what is gathered from it, which can be regathered before."""
        lists = self.graph.mutates
        for t, v in zip(lists.item.tolist(), lists.owner, strict=True):
            self.place[v] = max(self.place[v], self._last.get(t, -1) + 0.25)
