"""Choices on several base orders: one table that every goal is looked up in, within the limits of a call."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.base import Progress, ended, watched
from olla.graph import Graph, Rules
from olla.graph.collectives import gathers
from olla.order.base_orders import late_changes
from olla.order.gathers import gathered_late
from olla.plan import Options, Plan, Recomputed
from olla.recompute.bounds import busiest, heaviest
from olla.recompute.rewrite import recomputed_graph

_DROP_WORK = 40_000_000  # for one greedy run
_GATHER_RUNS = 12  # of it, beyond that, for every op and parameter in shards: each is a decision or two
DROP_SHARE = 0.5  # of the time limit, by which that stage ends at the latest
_LEAST_SHARE = 0.1  # of the time limit, that every stage gets however late it is: a late answer beats none
_BOUND_SHARE = 0.1  # of the time limit, for one lower bound
_LEAST_BOUND_SECONDS = 0.05
_NUM_TIGHTEST = 24  # ops with the largest cuts; more of them tightened no bound of 12 graphs with large gaps
_CLOSE = 0.002  # a peak this near to its bound is not searched for further


class Start(NamedTuple):
    """A base order, and what is chosen on it."""

    order: NDArray[np.int32]
    evictor: _core.CoreRecomputeSearch


def target(peak_bytes: int, added_seconds: float | None) -> _core.RecomputeTarget:
    """Return the target: the least added time within a peak, or, given an added time, the least peak within that."""
    most = math.inf if added_seconds is None else added_seconds
    return _core.RecomputeTarget(least_time=added_seconds is None, peak=peak_bytes, added_seconds=most)


class Starts:
    """Base orders of one graph, and what is chosen on each.

    Args:
        graph: the training step.
        rules: what may be done with its ops.
        options: of `olla.plan`; its time limit counts from here on.
        progress: as in `olla.plan`.

    Attributes:
        base_seconds: estimated time of the ops.
        interrupted: whether Ctrl-C or the progress callback ended it.
        starts: the base orders at hand, the best first.
        seen: all that there were.
        left_out: notes on heuristics that failed.
    """

    def __init__(self, graph: Graph, rules: Rules, options: Options, progress: Progress | None) -> None:
        self.start = time.perf_counter()
        self.graph, self.rules, self.options, self.progress = graph, rules, options, watched(progress)
        self.base_seconds = float(rules.seconds.sum())
        self.interrupted = False
        self.drop_work = _DROP_WORK + _GATHER_RUNS * int(gathers(graph).sum()) // 2 * graph.num_ops
        self.left_out: list[str] = []
        self.starts: list[Start] = []
        self.seen: list[Start] = []
        self._latest: tuple[Any, Recomputed] | None = None  # decisions, and the graph that they make

    @property
    def order(self) -> NDArray[np.int32]:
        """The base order."""
        return self.starts[0].order

    @property
    def evictor(self) -> _core.CoreRecomputeSearch:
        """What is chosen on it."""
        return self.starts[0].evictor

    def _start(self, order: NDArray[np.int32]) -> Start:
        if self.options.updates_may_move:
            order = late_changes(self.graph, order)
        order = gathered_late(self.graph, order)
        start = Start(order, self.rules.evictor(self.graph, order))
        self.seen.append(start)
        return start

    def _recall(self, peak_bytes: int, added_seconds: float | None) -> bool:
        """Go back to the best of all simulated choices; False if none meets the target."""

        def reached(start: Start) -> tuple[float, float]:
            front = start.evictor.front()
            peaks, seconds = front.peak_bytes, front.added_seconds  # the one rises, the other falls
            if added_seconds is None:
                i = int(np.searchsorted(peaks, peak_bytes, "right")) - 1
                return (float(seconds[i]), float(peaks[i])) if i >= 0 else (math.inf, math.inf)
            i = int(np.sum(seconds > added_seconds))
            return (float(peaks[i]), float(seconds[i])) if i < len(peaks) else (math.inf, math.inf)

        best = min(self.seen, key=reached)
        if not best.evictor.recall(target(peak_bytes, added_seconds)):
            return False
        self.starts = [best]
        return True

    def _left(self, share: float = 1.0) -> float:
        passed = time.perf_counter() - self.start
        return 0.0 if self._has_ended() else max(0.0, share * self.options.time_limit - passed)

    def _until(self, share: float) -> float:
        """Return the seconds left to a share of the time limit, or the least that every stage gets."""
        return 0.0 if self._has_ended() else max(self._left(share), _LEAST_SHARE * self.options.time_limit)

    def _has_ended(self) -> bool:
        """Whether Ctrl-C or the progress callback ended the search, or another one before it."""
        self.interrupted |= ended(self.progress)
        return self.interrupted

    def drop(self, peak_bytes: int, added_seconds: float, work: int | None = None) -> None:
        """Drop values until the peak is reached, or no time may be added any more."""
        work = self.drop_work if work is None else work
        limits = _core.Limits(time_limit=self._until(DROP_SHARE), max_work=work, progress=self.progress)
        self.interrupted |= self.evictor.run(peak_bytes, added_seconds, limits)

    @staticmethod
    def _ranked(starts: list[Start], peak_bytes: int) -> list[Start]:
        """Return what meets the peak first, with the least time; then the lowest."""
        return sorted(starts, key=lambda s: (max(s.evictor.peak - peak_bytes, 0), s.evictor.added_seconds))

    def _close_enough(self, peak_bytes: int, added_seconds: float | None) -> bool:
        """Whether the bounds leave next to nothing to gain."""
        if added_seconds is None:
            gap = self.evictor.added_seconds - self.least_seconds_bound(peak_bytes)
            return gap <= _CLOSE * self.base_seconds
        return self.evictor.peak <= (1 + _CLOSE) * self.least_peak_bound(added_seconds)

    def _bound_seconds(self) -> float:
        if self._has_ended():
            return 0.0
        return max(_LEAST_BOUND_SECONDS, min(self._left(), _BOUND_SHARE * self.options.time_limit))

    def least_peak_bound(self, added_seconds: float, ops: NDArray[np.int32] | None = None) -> int:
        """Return bytes: no rewriting that adds at most these seconds has a lower peak, by the cuts around some ops.

        Args:
            added_seconds: that may be added.
            ops: int32[k], those; None: the busiest ones of the base order.

        Complexity: up to 24 minimum cuts at each of the ops.
        """
        ops = busiest(self.graph, self.order) if ops is None else ops
        peaks, _ = self.evictor.least_peak(ops, added_seconds, self._bound_seconds(), self.progress)
        return max(int(peaks.max(initial=0)), self.graph.resident_bytes)

    def least_seconds_bound(self, peak_bytes: int, ops: NDArray[np.int32] | None = None) -> float:
        """Return seconds: no rewriting with at most this peak adds less, by the cuts around the same ops."""
        ops = busiest(self.graph, self.order) if ops is None else ops
        seconds, _ = self.evictor.least_added_seconds(ops, peak_bytes, self._bound_seconds(), self.progress)
        return float(seconds.max(initial=0.0))

    def _bounding(self, plan: Plan | None) -> NDArray[np.int32]:
        """Return ops whose cuts make good bounds: the busiest ones of the base order and of a plan, and the tightest.

        Those are the ones with the largest cuts where time costs nothing. A search that knew them would end as soon as
        its peak is proved, and leave time in the plan that it could have saved.

        Complexity: one minimum cut at each of 200 ops.
        """
        tried = heaviest(self.graph)
        cuts, _ = self.evictor.least_peak(tried, math.inf, self._bound_seconds(), self.progress)
        tightest = tried[np.argsort(-cuts, kind="stable")][:_NUM_TIGHTEST]
        ops = (*busiest(self.graph, self.order, plan).tolist(), *tightest.tolist())
        return np.array(list(dict.fromkeys(ops)), dtype=np.int32)

    def rewritten(self) -> Recomputed:
        """Return the graph that the decisions in force make."""
        drops = self.evictor.decisions()
        decisions = (self.order.tobytes(), drops.values.tobytes(), drops.steps.tobytes())
        if self._latest is None or self._latest[0] != decisions:
            self._latest = decisions, recomputed_graph(self.graph, self.rules, self.evictor)
        return self._latest[1]
