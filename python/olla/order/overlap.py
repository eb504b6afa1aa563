"""An order whose collectives run beside other ops as far as its peak allows: begun early, waited for late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.graph import Graph, Lists, collective_seconds
from olla.graph.collectives import WAIT
from olla.graph.timeline import issued_by

if TYPE_CHECKING:
    from olla._core import CoreGraph
    from olla.graph import DeviceProfile

Order = NDArray[np.int32]
_TRIES = 6  # places for one op, each half as far away as the one before
_ISSUE_TRIES = 3  # the same for a collective that moves alone


def overlapped(graph: Graph, core: CoreGraph, order: Order, device: DeviceProfile) -> Order:
    """Return the order with its collectives issued as early, and waited for as late, as the peak allows.

    A collective is issued right behind the last op that it needs; or, where the peak does not allow that, so early that
    it ends when it is waited for, or half as early, and so on. Where it still begins too late for that, what it needs
    moves with it. The op that waits, and with it what depends on it, moves behind ops that run meanwhile, until the
    collective has ended. No move raises the peak of the order.

    Args:
        graph: a training step.
        core: the same with all precedences.
        order: int32[num_ops], valid.
        device: what seconds are estimated for.

    Returns:
        int32[num_ops], a valid order with at most the same peak; the same order where nothing communicates.

    Complexity:
        O(collectives * ops).

    Example:
        >>> from olla.graph import PROFILES
        >>> b = Graph.builder("late")
        >>> a, c = b.tensor(300_000_000), b.tensor(8)
        >>> _ = b.op("make", writes=[a])
        >>> _ = b.op("sum", mutates=[a], collective="all_reduce", group="0", ranks=2, message_bytes=300_000_000)
        >>> _ = b.op("wait", mutates=[a], collective="wait", group="0", ranks=2)
        >>> _ = b.op("compute", writes=[c], seconds=0.02)
        >>> b.output(a), b.output(c)
        (None, None)
        >>> graph = b.build()
        >>> overlapped(graph, graph.core, np.arange(4, dtype=np.int32), PROFILES["a100"]).tolist()
        [0, 1, 3, 2]
    """
    if not graph.communicates.any():
        return order
    return _Overlap(graph, core, order, device).found()


class _Overlap:
    def __init__(self, graph: Graph, core: CoreGraph, order: Order, device: DeviceProfile) -> None:
        self.graph, self.core, self.order = graph, core, order
        self.limit: int = _core.profile(core, order).peak_bytes
        self.preds = Lists(*core.precedences())
        self.own, self.link = device.op_seconds(graph), collective_seconds(graph, device)
        self.issue = issued_by(graph)

    def found(self) -> Order:
        talks = [v for v in self.order.tolist() if self.graph.collectives[v]]
        for v in talks:
            if self.graph.collectives[v] != WAIT:
                self._issue_early(v)
        ends = self._ends()
        for v in talks:
            if v in self.issue:
                self._wait_late(v, ends[self.issue[v]])
        return self.order

    def _issue_early(self, v: int) -> None:
        step = np.empty(len(self.order), dtype=np.int64)  # not by sorting: this runs for every collective
        step[self.order] = np.arange(len(self.order))
        first, now = int(step[self.preds.of(v)].max(initial=-1)) + 1, int(step[v])
        begins = np.cumsum(self.own[self.order]) - self.own[self.order]
        in_time = int(np.searchsorted(begins, begins[now] - self.link[v], side="right")) - 1
        alone = [first, *(now - (now - max(first, in_time)) // 2**i for i in range(_ISSUE_TRIES))]
        at = next((p for p in dict.fromkeys(alone) if p >= now or self._accept(self._ahead(p, now))), now)
        window = at if at > in_time else 0
        for _ in range(_TRIES):
            if window < 2 or self._accept(self._ahead(at - window, at)):
                return
            window //= 2

    def _wait_late(self, v: int, end: float) -> None:
        step = int(np.flatnonzero(self.order == v)[0])
        target = int(np.searchsorted(np.cumsum(self.own[self.order]), end)) + 1
        for _ in range(_TRIES):
            if target <= step + 1 or self._accept(self._behind(step, min(target, len(self.order)))):
                return
            target = step + (target - step) // 2

    def _ends(self) -> dict[int, float]:
        """Return when the collective of each op that issues one ends, if the ops run without a stop."""
        now, free, ends = 0.0, dict[str, float](), dict[int, float]()
        for v in self.order.tolist():
            now += float(self.own[v])
            if self.graph.collectives[v] not in ("", WAIT):
                group = self.graph.groups[v]
                ends[v] = free[group] = max(free.get(group, 0.0), now) + float(self.link[v])
        return ends

    def _behind(self, first: int, last: int) -> Order:
        """Return the order in which op first, and what depends on it, is behind the other ops before step last."""
        waits, later = [int(self.order[first])], {int(self.order[first])}
        others: list[int] = []
        for u in self.order[first + 1 : last].tolist():
            depends = not later.isdisjoint(self.preds.of(u).tolist())
            (waits if depends else others).append(u)
            if depends:
                later.add(u)
        moved = np.array([*others, *waits], dtype=np.int32)
        return np.concatenate([self.order[:first], moved, self.order[last:]])

    def _ahead(self, first: int, last: int) -> Order:
        """Return the order in which op last, and what it needs, is before the other ops from step first on."""
        v = int(self.order[last])
        needed, others, wanted = [v], list[int](), set(self.preds.of(v).tolist())
        for u in reversed(self.order[first:last].tolist()):
            (needed if u in wanted else others).append(u)
            if u in wanted:
                wanted.update(self.preds.of(u).tolist())
        moved = np.array([*reversed(needed), *reversed(others)], dtype=np.int32)
        return np.concatenate([self.order[:first], moved, self.order[last + 1 :]])

    def _accept(self, order: Order) -> bool:
        """Take an order unless its peak is higher; whether it was taken."""
        order = np.ascontiguousarray(order, dtype=np.int32)
        if _core.profile(self.core, order).peak_bytes > self.limit:
            return False
        self.order = order
        return True
