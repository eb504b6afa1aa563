"""Search for what to recompute and what to write in place: drop values on base orders, improve, order again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.base import Progress, rivals
from olla.errors import BudgetError
from olla.graph import Graph, Rules
from olla.graph.operators import without_replays
from olla.order.base_orders import base_orders, early_updates
from olla.pipeline import Ordered, find_order
from olla.plan import Options, Plan, Recomputed
from olla.recompute.bounds import refusal
from olla.recompute.improving import IMPROVE_SHARE, ORDER_WORK, REBASE_SHARE, TRIAL_WORK, WORTH, Improving, is_movable
from olla.recompute.starts import DROP_SHARE

# What a search may do is limited in work, so that its results are the same on every machine; time limits it only where
# a caller leaves less than the work takes. A million units take about 10 ms of ordering, 60 ms of choosing.
_BASE_WORK = 60_000_000  # for the best order without rewriting
_IMPROVE_WORK, _IMPROVE_RUNS = 12_000_000, 6_000  # for improving the choice: in all, and per op
_RIVAL_SHARE = 1 / 2  # of that work, on a base order where the greedy ended better than on the first one
_BASE_SHARE = 0.2  # of the time limit
_TIE = 0.001  # share of a peak: lowering it by less is not worth added time
_TIE_SHARE, _TIE_WORK = 1 / 6, 600_000  # of the work of improving, and at least: for less time at that peak
_SHARES = 0.0, 0.02, 0.05, 0.1, 0.2, 0.4  # of the step's time, that the last plans for a budget may add
_AGAIN = 0.6  # share of the current added time: limit of a search from scratch
_AGAIN_FROM = 0.05  # share of the step's time: less added time than that is no reason to start over
_PROGRAM_SHARE = 0.9


class Base(NamedTuple):
    """A graph before it is rewritten.

    Attributes:
        found: the best order, and its proof.
        first_order: int32[n], the base order that choices start from.
    """

    found: Ordered
    first_order: NDArray[np.int32]


def _find_base(graph: Graph, options: Options, progress: Progress | None, left_out: list[str]) -> Base:
    """Return the best order, and one with early weight updates, which free gradients, if that costs no memory.

    A heuristic that fails is left out, with a note in `left_out`.
    """
    limit = _BASE_SHARE * options.time_limit
    # An integer program chooses what to drop; the order it starts from is the best there is in either case.
    method = "auto" if options.method == "ilp" else options.method
    quick = replace(options, method=method, layout=False, time_limit=limit, max_work=_BASE_WORK)
    found = find_order(graph, quick, progress, overlap=False)
    left_out += [line for line in found.answer.details if line.startswith(rivals.LEFT_OUT)]
    if not is_movable(options):
        return Base(found, found.order.copy())
    schedule = {"the best order with early updates": lambda: early_updates(graph, found.order)}
    early = list(rivals.orders(graph.core, schedule, left_out).values()) or [found.order]
    limits = _core.Limits(time_limit=limit, max_work=ORDER_WORK, progress=progress)
    better = _core.order(graph.core, early, options.seed, limits)
    return Base(found, better.order if better.peak_bytes <= found.peak_bytes else found.order.copy())


class RecomputeSearch(Improving):
    """What to recompute and what to write in place in one graph.

    Args:
        graph: the training step.
        rules: what may be done with its ops.
        options: of `olla.plan`; its time limit counts from here on.
        progress: as in `olla.plan`.
        base: what another search found for the same graph and options.

    Attributes:
        base_peak_bytes: of the best order without rewriting.
        lowest_bytes: the lowest peak that was reached towards a budget.
    """

    def __init__(
        self, graph: Graph, rules: Rules, options: Options, progress: Progress | None, base: Base | None = None
    ) -> None:
        # The integer program knows no draws that are repeated.
        super().__init__(graph, without_replays(rules) if options.method == "ilp" else rules, options, progress)
        self.lowest_bytes = 2**62
        self.improve_work = min(_IMPROVE_WORK, _IMPROVE_RUNS * graph.num_ops)
        self.notes: tuple[str, ...] = ()  # on the choice, for the plan's details
        self.base = _find_base(graph, options, self.progress, self.left_out) if base is None else base
        self.base_peak_bytes = self.base.found.peak_bytes
        self._first = self._start(self.base.first_order)
        self.starts = [self._first]  # after a choice: the best first
        self._has_chosen = False

    def choose(self, peak_bytes: int, added_seconds: float) -> None:
        """Drop values on several base orders; go on with the one where that ends best."""
        self.drop(peak_bytes, added_seconds)
        if not is_movable(self.options):
            return
        goal = None if peak_bytes > 0 else added_seconds
        starts = self.starts
        for order in base_orders(self.graph, self.base.found.order, self.left_out):
            if self.interrupted or self._left(DROP_SHARE) <= 0.0 or self._close_enough(peak_bytes, goal):
                break
            with rivals.optional("a base order", self.left_out, self.progress):
                self.starts = [self._start(order)]
                self.drop(peak_bytes, added_seconds, TRIAL_WORK)
                starts += self.starts
            self.starts = self._ranked(starts, peak_bytes)
        self.starts = self._ranked(starts, peak_bytes)

    def improve(self, peak_bytes: int, added_seconds: float | None) -> None:
        """Search for less added time within the peak, or, given an added time, for a lower peak within that."""
        work, self.improve_work = self.improve_work, self.improve_work // 2  # what follows is a small step from here
        first = next((s for s in self.starts if s is self._first), self.starts[0])
        rival = self.starts[0]  # the greedy's result predicts the search's only roughly
        for start, share in ((first, 1.0), (rival, _RIVAL_SHARE))[: 1 if rival is first else 2]:
            self.starts = [start]
            if added_seconds is not None or start.evictor.peak <= peak_bytes:
                self._search(peak_bytes, added_seconds, int(share * work))
        self.starts = self._ranked([rival, first], peak_bytes)
        if is_movable(self.options):
            self._rebase(peak_bytes, added_seconds, int(REBASE_SHARE * work))
        self._recall(peak_bytes, added_seconds)

    def _solve(self, peak_bytes: int, added_seconds: float | None) -> None:
        """With the method "ilp": solve the integer program of the choice, for the base order."""
        if self.options.method != "ilp" or self.interrupted:
            return
        from olla.recompute.ilp import proof, solve_choice

        bound = 0.0
        if added_seconds is None:
            bound = self.least_seconds_bound(peak_bytes)
        else:
            peak_bytes = self.least_peak_bound(added_seconds)
        found = solve_choice(
            self.evictor,
            peak_bytes=peak_bytes,
            added_seconds=added_seconds,
            bound=bound,
            time_limit=self._until(_PROGRAM_SHARE),
            seed=self.options.seed,
            progress=self.progress,
        )
        self.interrupted |= found.cancelled
        self.notes = (proof(found, added_seconds is None),)

    def least(self, added_seconds: float) -> tuple[Recomputed]:
        """Find the least peak that adds at most so many seconds."""
        self.choose(0, added_seconds)
        self.improve(0, added_seconds)
        self._settle(added_seconds)
        self._solve(0, added_seconds)
        return (self.rewritten(),)

    def _settle(self, added_seconds: float) -> None:
        """Reduce the added time at nearly the same peak: the last bytes are not worth any price."""
        seconds, enough = self.evictor.added_seconds, int((1 + _TIE) * self.evictor.peak)
        if seconds <= 0 or self.interrupted:
            return
        self._recall(enough, None)
        self._cheapen(enough)
        self._search(enough, None, max(_TIE_WORK, int(_TIE_SHARE * self.improve_work)))
        self._press(enough)
        if added_seconds == math.inf:  # a given limit is accepted as it is; a second search takes as long as the first
            self._begin_again(enough)
        self._recall(0, added_seconds if self.evictor.added_seconds > WORTH * seconds else self.evictor.added_seconds)

    def within(self, peak_bytes: int) -> tuple[Recomputed] | None:
        """Find the least added time for a peak; None where that is not reached."""
        self.drop(peak_bytes, math.inf)
        if not self._has_chosen or self.evictor.peak > peak_bytes:
            self.choose(peak_bytes, math.inf)
        self._has_chosen = True
        if self.evictor.peak > peak_bytes and self.least_peak_bound(math.inf) <= peak_bytes:
            self.improve(0, math.inf)  # the bounds allow it, but the greedy stopped above it
        if self.evictor.peak <= peak_bytes:
            self._cheapen(peak_bytes)
            self.improve(peak_bytes, None)
            self._press(peak_bytes)
            self._begin_again(peak_bytes)
        self._solve(peak_bytes, None)
        self.lowest_bytes = min(self.lowest_bytes, self.evictor.peak)
        return (self.rewritten(),) if self.evictor.peak <= peak_bytes else None

    def _begin_again(self, peak_bytes: int) -> None:
        """Choose from the beginning with much less time allowed, where the bounds leave room for that."""
        while self.options.method != "ilp" and self._left(IMPROVE_SHARE) > 0.0:
            seconds = self.evictor.added_seconds
            cap = _AGAIN * seconds
            if seconds <= _AGAIN_FROM * self.base_seconds or self.least_seconds_bound(peak_bytes) > cap:
                return
            search = self._other()
            search.choose(0, cap)
            search.improve(0, cap)
            self._take(search)
            if search.evictor.peak > peak_bytes:
                return
            self.seen += search.seen
            self._recall(peak_bytes, None)

    def lower(self) -> tuple[Recomputed] | None:
        """Find a lower peak than the current one for about the same time; None if there is none."""
        peak, most = self.evictor.peak, self.evictor.added_seconds / WORTH
        if self.options.method == "ilp" or self._left(IMPROVE_SHARE) <= 0.0 or not self._recall(0, most):
            return None
        self._search(0, most, self.improve_work)
        return (self.rewritten(),) if self.evictor.peak < peak else None

    def _other(self) -> RecomputeSearch:
        """Return a search that has chosen nothing."""
        rest = replace(self.options, time_limit=self._left())
        return RecomputeSearch(self.graph, self.rules, rest, self.progress, self.base)

    def _take(self, other: RecomputeSearch) -> None:
        """Take over whether another search was interrupted, and its notes."""
        self.interrupted |= other.interrupted
        self.left_out += other.left_out

    def last_resorts(self, budget_bytes: int) -> Iterator[tuple[Recomputed]]:
        """Yield what else may fit a budget that nothing was found within: the least peak at whatever time.

        Donated inputs may let the graph reach a lower peak that an arena cannot use: with them, the least peaks within
        some added times follow.
        """
        if self.least_peak_bound(math.inf) > budget_bytes:
            return
        for share in (math.inf, *(_SHARES if self.graph.donated.any() else ())):
            if self._has_ended() or (share < math.inf and self._left(IMPROVE_SHARE) <= 0.0):
                return
            search = self._other()
            found = search.least(share * self.base_seconds)
            self._take(search)
            yield found

    def final_options(self) -> Options:
        """Return the options by which the graph that was found is ordered and laid out."""
        return replace(self.options, order=None, time_limit=self._until(1.0), max_work=ORDER_WORK)

    @property
    def details(self) -> tuple[str, ...]:
        """Lines for a reader who wants to know more."""
        return (*self.notes, *self.left_out)

    def refused(self, budget_bytes: int) -> BudgetError:
        """Return the error for a budget that nothing was found for."""
        ops = self._bounding(None)
        needs, _ = self.evictor.least_peak(ops, math.inf, self._bound_seconds(), self.progress)
        highest = np.argsort(-needs, kind="stable")[:3]
        return refusal(self.graph, budget_bytes, self.lowest_bytes, ops[highest], needs[highest], "more levers")

    def bounds(self, plan: Plan, added_seconds: float, most_seconds: float, peak_bytes: int) -> tuple[int, float]:
        """Return what is proved about every other plan.

        Args:
            plan: of what was found.
            added_seconds: that it adds to the graph.
            most_seconds: that a plan may add.
            peak_bytes: which it reaches.

        Returns:
            The least peak within `most_seconds`, in bytes; the least added time within `peak_bytes`, in seconds.
        """
        ops = self._bounding(plan)
        return self.least_peak_bound(most_seconds, ops), self.least_seconds_bound(peak_bytes, ops)
