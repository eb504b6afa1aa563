"""Improve a choice: local search, the order of the rewritten graph as a new base, less time for the same peak."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from olla import _core
from olla.base import rivals
from olla.order.base_orders import induced
from olla.pipeline import find_order
from olla.plan import Options
from olla.recompute.bounds import busiest
from olla.recompute.starts import Starts, target

# Units of work: see recompute/search.py.
ORDER_WORK = 15_000_000  # for ordering one other graph, or from one other start
TRIAL_WORK = 4_000_000  # for a greedy run on a further base order
REBASE_SHARE = 1 / 6  # of the work of improving, on the order of the rewritten graph
IMPROVE_SHARE = 0.7  # of the time limit, by which that ends
WORTH = 0.98  # share of the added time, that a choice must be below to be worth such memory
_CAPS = 0.75, 0.9, 0.97  # shares of the current added time: limits of further greedy runs
_CAP_WORK, _CAP_RUNS = 600_000, 100  # for such a run on every base order; per op, at least
_NEAR = 0.02  # share of a peak, by which the best order of a choice may be below the order that it was made on
_NEAR_SHARE = 1 / 4  # of the work of ordering anew
_CHEAPER = 0.9  # share of the added time, below which what misses a peak by so little is ordered
_MAX_ROUNDS = 1000  # of the local search; work ends it earlier on all but small graphs
_NUM_SEED_OPS = 3  # whose bounds the local search starts from, too
# The next two and those of `_begin_again`: found with bench/recompute/bench_front.py, which says what that is worth.
_NEARLY = 0.03  # share of a peak, by which what is searched for a lower one may miss it
_FREE = 0.001  # share of the step's time: added time below it is not reduced further


def is_movable(options: Options) -> bool:
    """Whether any valid order will do as a base order."""
    return options.order is None and options.updates_may_move


class Improving(Starts):
    """Choices on several base orders, and the steps that improve them.

    Attributes:
        improve_work: of a local search.
    """

    improve_work: int

    def _search(self, peak_bytes: int, added_seconds: float | None, work: int) -> None:
        """Improve the current choice on the current base order by local search."""
        limit = self._until(IMPROVE_SHARE)
        if limit <= 0.0 or self._close_enough(peak_bytes, added_seconds):
            return
        limits = _core.Limits(time_limit=limit, max_work=work, progress=self.progress)
        ops = busiest(self.graph, self.order)[:_NUM_SEED_OPS].tolist()
        goal = target(peak_bytes, added_seconds)
        self.interrupted |= self.evictor.improve(goal, ops, _MAX_ROUNDS, self.options.seed, limits)

    def _rebase(
        self, peak_bytes: int, added_seconds: float | None, work: int, most: float = math.inf, share: float = 1.0
    ) -> None:
        """Choose anew on the best order of the rewritten graph; go on with that where it is better.

        Args:
            work: for improving the choice.
            most: seconds that may be added within a peak.
            share: of the work for ordering and for dropping that there is.
        """
        if self._left(IMPROVE_SHARE) <= 0.0 or self._close_enough(peak_bytes, added_seconds):
            return
        before = self.starts
        with rivals.optional("the order of the rewritten graph", self.left_out, self.progress) as failed:
            found = self.rewritten()
            options = replace(
                self.options, layout=False, time_limit=self._until(IMPROVE_SHARE), max_work=int(share * ORDER_WORK)
            )
            best = find_order(found.graph, options, self.progress, overlap=False).order
            order = induced(self.graph, best, found.origin)
            if order is None or np.array_equal(order, self.order):
                return
            self.starts = [self._start(order)]
            self.drop(peak_bytes, most if added_seconds is None else added_seconds, int(share * TRIAL_WORK))
            if added_seconds is not None or self.evictor.peak <= peak_bytes:
                self._search(peak_bytes, added_seconds, work)
        self.starts = before if failed else self._ranked([*before, *self.starts], peak_bytes)

    def _cheapen(self, peak_bytes: int) -> None:
        """Look for less time within the peak: from a cheaper choice just above it, and by greedy runs with less time.

        The cheaper choice is ordered anew, and its best order is one more base order.
        """
        seconds = self.evictor.added_seconds
        if self.options.method == "ilp" or seconds <= 0:
            return
        near = self._recall(0, _CHEAPER * seconds) and peak_bytes < self.evictor.peak <= (1 + _NEAR) * peak_bytes
        if near and is_movable(self.options):
            self._rebase(peak_bytes, None, int(REBASE_SHARE * self.improve_work), seconds, _NEAR_SHARE)
        self._recall(peak_bytes, None)
        self._spend_less(peak_bytes)

    def _press(self, peak_bytes: int) -> None:
        """Look for less time at the peak by lowering the peak of cheaper choices just above it.

        Their added time is capped, and their peak minimized: this gets past local optima of a search for less time.
        """
        while self.options.method != "ilp" and self._left(IMPROVE_SHARE) > 0.0:
            seconds = self.evictor.added_seconds
            cap = _CHEAPER * seconds
            if seconds <= _FREE * self.base_seconds or self.least_seconds_bound(peak_bytes) > cap:
                return
            if self._recall(0, cap) and self.evictor.peak <= (1 + _NEARLY) * peak_bytes:
                self._search(0, cap, self.improve_work)
                if self.evictor.peak > peak_bytes and is_movable(self.options):
                    self._rebase(0, cap, int(REBASE_SHARE * self.improve_work))
            self._recall(peak_bytes, None)
            if self.evictor.added_seconds > WORTH * seconds:
                return

    def _spend_less(self, peak_bytes: int) -> None:
        """Rerun the greedy on every base order with less time than is used now: a tight limit changes its choices."""
        work, none = _CAP_WORK // len(self.seen), np.zeros(0, dtype=np.int32)
        if work < _CAP_RUNS * self.graph.num_ops:
            return
        for cap in _CAPS:
            seconds = cap * self.evictor.added_seconds
            if self._left(IMPROVE_SHARE) <= 0.0 or self._close_enough(peak_bytes, None):
                return
            limits = _core.Limits(time_limit=self._left(IMPROVE_SHARE), max_work=work, progress=self.progress)
            for start in self.seen:
                start.evictor.reset(none, none)
                self.interrupted |= start.evictor.run(peak_bytes, seconds, limits)
            self._recall(peak_bytes, None)
