"""Swaps for `olla.plan`: on top of recomputation towards a goal, or by AutoSwap."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla.base import Progress, rivals, watched
from olla.errors import BudgetError
from olla.graph import Graph, Rules, rules
from olla.plan import BudgetPlan, Goal, Link, Options, Source, SwapPlan, Swaps, graph_of
from olla.plan.swapped import SwapDecision
from olla.plan.swaps import PCIE3
from olla.recompute.search import Run, needed_bytes
from olla.swap.assemble import with_swaps
from olla.swap.autoswap import SCORES, AutoSwap
from olla.swap.bound import bounded, working_sets
from olla.swap.choose import plan_swaps

_SWAP_WORK = 10_000_000  # for one choice of swaps
_LAST_WORK = 30_000_000  # for the last one
_TURN_WORK = 3_000_000  # for the recomputation, per turn
_SWAP_SHARE = 0.15  # of the time limit, by which a choice of swaps ends at the latest
_TURN_SHARE = 0.06
_NUM_TURNS = 3  # of recomputation and swaps, each beside what the other leaves
_NUM_REPAIRS = 8  # of the recomputation, per turn
_ALONE_SHARE = 0.4  # of the time limit, for a plan without swaps
_FINAL_SHARE = 0.4  # of the time limit, for ordering and laying out what was chosen
_NUM_TARGETS = 12  # peaks of the recomputation that are tried for a budget
_LEAST_STEP = 0.002  # of the peak, from one to the next
_MOST_STALL = 1.0  # share of the step's time, that ops may wait for copies where running them again does not help
_MAX_LAYOUTS = 4  # until the arena fits a budget


def autoswap(
    source: Source,
    options: Options,
    goal: Goal | None,
    *,
    device: Any = "a100",
    link: Link | float | None = None,
    host_bytes: int | None = None,
    score: str = "best",
    progress: Progress | None = None,
) -> SwapPlan:
    """Plan by AutoSwap, on the program order or the one in the options; see `olla.plan`.

    Args:
        source: what to plan.
        options: of `olla.plan`.
        goal: a budget: stick to the limit; a slowdown: least peak within it; none: no overhead.
        device: what seconds are estimated for, where there is no goal.
        link: to host memory; default: what its authors saw.
        host_bytes: host memory there is.
        score: one of `olla.swap.autoswap.SCORES`, or "best".
        progress: as in `olla.plan`.

    Raises:
        BudgetError: the blocks do not suffice for the budget.
        ValueError: the score is unknown.
    """
    if options.precedences:
        raise ValueError("precedences cannot be combined with swapping: add them to the graph as `after` of its ops")
    if score not in (*SCORES, "best"):
        raise ValueError(f"score is {score!r}, expected 'best' or one of {', '.join(SCORES)}")
    graph, speed = graph_of(source), Link.of(PCIE3 if link is None else link)
    goal = goal or Goal.of(None, 0.0, None, device, False, False)
    assert goal is not None
    order = np.arange(graph.num_ops, dtype=np.int32) if options.order is None else options.order.astype(np.int32)
    deadline = time.perf_counter() + (1.0 - _FINAL_SHARE) * options.time_limit
    method = AutoSwap(graph, order, goal.device.op_seconds(graph), speed, host_bytes, deadline)
    names = SCORES if score == "best" else (score,)
    limit = goal.budget_bytes
    if limit is not None:
        found = [method.at_limit(name, limit) for name in names]
        fitting = [swaps for swaps in found if swaps.peak_bytes <= limit and swaps.host_bytes <= method.host_bytes]
        if not fitting:
            lowest = min(swaps.peak_bytes for swaps in found)
            raise BudgetError(
                f"the budget is {limit} bytes, and AutoSwap does not reach it: the lowest found is {lowest} bytes; "
                "method 'auto' with recomputation may",
                rule="budget",
            )
        best = min(fitting, key=lambda swaps: swaps.stall_seconds)
    else:
        slowdown = math.inf if goal.minimise else goal.max_slowdown or 0.0
        best = min((method.least_peak(name, slowdown) for name in names), key=lambda swaps: swaps.peak_bytes)
    plan = with_swaps(graph, order, best, options, progress, goal=goal.record_with(speed, host_bytes))
    plan = replace(plan, method="autoswap")
    return _explained(graph, plan, rules(graph, goal.device, in_place=False, recompute=False), speed)


def run(
    graph: Graph,
    options: Options,
    goal: Goal,
    *,
    link: Link | float | None = None,
    host_bytes: int | None = None,
    state: bool = False,
    progress: Progress | None = None,
    narrow: Callable[[Rules], Rules] | None = None,
) -> SwapPlan:
    """Plan towards a goal by recomputation, in-place results and swaps; see `olla.plan`.

    Time is spent on recomputation first, which frees more bytes a second than waiting for copies does; swaps fill the
    link meanwhile. Then each is chosen anew beside what the other leaves, in turn.

    Args:
        graph: what to plan.
        options: of `olla.plan`.
        goal: what is asked for.
        link: to host memory; default: the device's.
        host_bytes: host memory there is.
        state: whether optimizer state may wait in host memory from step to step.
        progress: as in `olla.plan`.
        narrow: takes away what whoever runs the plan cannot do, as in `olla.recompute.search.Run`.

    Raises:
        BudgetError: no plan was found that fits the budget.
    """
    speed = Link.of(goal.device if link is None else link)
    search = _Combined(graph, options, goal, speed, host_bytes, state, progress, narrow)
    return search.explained(search.slowed() if goal.budget_bytes is None else search.fitted(goal.budget_bytes))


def _explained(graph: Graph, plan: SwapPlan, may: Rules, link: Link, lasting: Any = ()) -> SwapPlan:
    """Return the plan with its bounds, and a line on every tensor that is swapped."""
    swapped = (line for line in plan.decisions(graph, may) if isinstance(line, SwapDecision))
    return replace(bounded(graph, plan, may, link, lasting), details=(*plan.details, *map(str, swapped)))


class _Found(NamedTuple):
    """A choice of what runs again and of what is swapped, on the order in which the rewriter runs the ops.

    Attributes:
        drops: in force, as the evictor takes them.
        graph: the rewritten one.
        position: int32[graph.num_ops], step of the base order that op i runs at or before.
        swaps: of the graph's program order.
        added_seconds: by running ops again and by waiting.
    """

    drops: tuple[NDArray[np.int32], NDArray[np.int32]]
    graph: Graph
    position: NDArray[np.int32]
    swaps: Swaps
    added_seconds: float

    def absent(self, num_steps: int) -> NDArray[np.int64]:
        """Return int64[num_steps], bytes: what is in host memory at least, at every step of the base order."""
        change = np.zeros(self.graph.num_ops + 1, dtype=np.int64)
        num_bytes = self.graph.tensor_bytes[self.swaps.tensor]
        np.add.at(change, self.swaps.freed, num_bytes)
        np.subtract.at(change, self.swaps.issue, num_bytes)
        least = np.full(num_steps, 2**62, dtype=np.int64)
        np.minimum.at(least, self.position, np.cumsum(change)[:-1])
        return np.where(least < 2**62, least, 0)


class _Combined:
    """One call of `run`."""

    def __init__(
        self,
        graph: Graph,
        options: Options,
        goal: Goal,
        link: Link,
        host_bytes: int | None,
        state: bool,
        progress: Progress | None,
        narrow: Callable[[Rules], Rules] | None,
    ) -> None:
        if options.precedences:
            raise ValueError(
                "precedences cannot be combined with swapping: add them to the graph as `after` of its ops"
            )
        self.start = time.perf_counter()
        self.graph, self.options, self.goal, self.link = graph, options, goal, link
        self.host_bytes, self.state, self.progress, self.narrow = host_bytes, state, watched(progress), narrow
        self.left_out: list[str] = []
        quick = replace(options, layout=False)
        beside = goal if goal.budget_bytes is None else replace(goal, budget_bytes=None, minimise="peak")
        self.recompute = Run(graph, quick, beside, self.progress, narrow)  # a budget is met by both
        self.lowest_bytes = 2**62

    def _left(self) -> float:
        return max(0.0, self.options.time_limit - (time.perf_counter() - self.start))

    def _late(self) -> bool:
        return self._left() < _FINAL_SHARE * self.options.time_limit

    def slowed(self) -> SwapPlan:
        """Find the least peak within the goal's slowdown, or at whatever time."""
        slowdown = self.goal.max_slowdown
        added = math.inf if slowdown is None else slowdown * self.recompute.base_seconds
        self.recompute.choose(0, added)
        self.recompute.improve(0, added)
        best = found = alone = self._with_swaps(added)
        for turn in range(_NUM_TURNS):
            if self._late():
                break
            with rivals.optional("a turn beside swaps", self.left_out, self.progress) as failed:
                self._beside(found, False, 0, added, turn)
                found = self._with_swaps(added)
            if failed:
                break
            if found.swaps.peak_bytes < best.swaps.peak_bytes:
                best = found
        plan = self._plan(best, added)
        if best is not alone and plan.peak_bytes > self.recompute.least_peak(added):
            return min(plan, self._plan(alone, added), key=lambda found: found.peak_bytes)
        return plan  # there is no lower one without swaps

    def fitted(self, budget_bytes: int) -> SwapPlan:
        """Find the least added time with which everything fits, the arena included."""
        alone = beside = None
        with rivals.optional("a plan without swaps", self.left_out, self.progress) as first:
            alone = self._without_swaps(budget_bytes)
        if alone is not None and alone.added_seconds == 0:
            return alone
        with rivals.optional("a plan with swaps", self.left_out, self.progress) as second:
            beside = self._fitted_with_swaps(budget_bytes)
        fitting = [plan for plan in (beside, alone) if plan is not None]
        if not fitting:
            raise next(iter(first + second), self._refused(budget_bytes))
        return min(fitting, key=lambda plan: plan.added_seconds)

    def _without_swaps(self, budget_bytes: int) -> SwapPlan | None:
        """Return the plan of recomputation alone; None where that does not fit."""
        limit = _ALONE_SHARE * self.options.time_limit
        search = Run(self.graph, replace(self.options, time_limit=limit), self.goal, self.progress, self.narrow)
        try:
            plan = search.run()
        except BudgetError:
            self.lowest_bytes = min(self.lowest_bytes, search.lowest_bytes)
            return None
        seconds = self._seconds(plan.origin, plan.rerun)
        swaps = self._swaps(plan.graph, plan.order, seconds, 0.0, budget_bytes, _SWAP_WORK)  # none: it fits
        found = self._swapped(plan, plan.order, swaps)
        return found if needed_bytes(found.graph, found) <= budget_bytes else None

    def _fitted_with_swaps(self, budget_bytes: int) -> SwapPlan | None:
        """Return the plan of recomputation beside swaps; None where that does not fit."""
        target = budget_bytes
        self.recompute.choose(target, math.inf)
        for _ in range(_MAX_LAYOUTS):
            found = self._within(target)
            self.lowest_bytes = min(self.lowest_bytes, found.swaps.peak_bytes)
            if found.swaps.peak_bytes > target:
                break
            plan = self._plan(found, math.inf, target)
            excess = needed_bytes(plan.graph, plan) - budget_bytes
            if excess <= 0:
                return plan
            target = min(target, plan.peak_bytes) - excess
        return None

    def _within(self, limit: int) -> _Found:
        """Recompute as little as swaps allow for a peak within the limit; the lowest peak where that fails."""
        self._reset()
        found = self._with_swaps(0.0, limit)
        for _ in range(_NUM_TARGETS):
            excess = found.swaps.peak_bytes - limit
            if excess <= 0:
                break
            before = self.recompute.evictor.peak
            self.recompute.drop(before - max(excess, int(_LEAST_STEP * before)), math.inf)
            if self.recompute.evictor.peak >= before:
                return self._with_swaps(math.inf, limit)  # running ops again does not help any more
            found = self._with_swaps(0.0, limit)
        best = found
        for turn in range(_NUM_TURNS):
            if self._late() or found.swaps.peak_bytes > limit:
                break
            self._beside(found, True, limit, math.inf, turn)
            found = self._with_swaps(0.0, limit)
            if found.swaps.peak_bytes <= limit and found.added_seconds < best.added_seconds:
                best = found
        return best

    def _reset(self) -> None:
        none = np.zeros(0, dtype=np.int32)
        self.recompute.evictor.set_absent(np.zeros(self.graph.num_ops, dtype=np.int64))
        self.recompute.evictor.reset(none, none)

    def _beside(self, found: _Found, least_time: bool, limit: int, added: float, turn: int) -> None:
        """Improve the recomputation beside swaps: what they take from the device counts nothing."""
        evictor = self.recompute.evictor
        evictor.set_absent(found.absent(self.graph.num_ops))
        seconds, seed = _TURN_SHARE * self.options.time_limit, self.options.seed + turn
        left = min(seconds, self._left())
        evictor.improve(least_time, limit, added, seed, _NUM_REPAIRS, left, self.progress, _TURN_WORK, [])
        evictor.set_absent(np.zeros(self.graph.num_ops, dtype=np.int64))

    def _with_swaps(self, added: float, limit: int | None = None) -> _Found:
        """Swap on top of the recomputation in force; ops may wait for what that leaves of the added seconds."""
        r = self.recompute
        graph, origin, rerun, _ = r.rewritten()
        step = np.argsort(r.order).astype(np.int32)
        position = np.where(rerun == 0, step[origin], np.int32(self.graph.num_ops))
        position = np.minimum.accumulate(position[::-1])[::-1]  # what runs again does so before the op it serves
        seconds = self._seconds(origin, rerun)
        program = np.arange(graph.num_ops, dtype=np.int32)
        swaps = self._swaps(graph, program, seconds, added, limit, _SWAP_WORK)
        again = max(0.0, float(seconds.sum()) - r.base_seconds)
        return _Found(r.evictor.drops, graph, position, swaps, again + swaps.stall_seconds)

    def _seconds(self, origin: NDArray[np.int32], rerun: NDArray[np.uint8]) -> NDArray[np.float64]:
        may = self.recompute.rules
        return np.where(rerun != 0, may.rerun_seconds[origin], may.seconds[origin])

    def _swaps(
        self,
        graph: Graph,
        order: NDArray[np.int32],
        seconds: NDArray[np.float64],
        added: float,
        limit: int | None,
        work: int,
    ) -> Swaps:
        spent = float(seconds.sum())
        left = min(max(0.0, added - (spent - self.recompute.base_seconds)), _MOST_STALL * spent)
        return plan_swaps(
            graph,
            order,
            seconds,
            self.link,
            limit=limit,
            max_slowdown=left / max(spent, 1e-30),
            host_bytes=self.host_bytes,
            lasting=self._lasting(graph),
            time_limit=max(_SWAP_SHARE * self.options.time_limit, 0.02),
            seed=self.options.seed,
            progress=self.progress,
            max_work=work,
        )

    def _lasting(self, graph: Graph) -> NDArray[np.int32]:
        """Return the optimizer state of a graph, the original or a rewritten one, where it may be swapped."""
        state = np.array([kind == "optimizer_state" for kind in graph.tensor_kinds], dtype=np.bool_)
        state &= ~graph.donated & self.state
        state[graph.outputs] = False
        state[graph.writes.item] = False
        return np.flatnonzero(state).astype(np.int32)

    def _plan(self, found: _Found, added: float, limit: int | None = None) -> SwapPlan:
        """Order what was found, choose its swaps again in that order, and take the better of both."""
        self.recompute.evictor.reset(*found.drops)
        plan = replace(self.recompute.finish(), goal=self.goal.record())
        order, swaps = np.arange(plan.num_ops, dtype=np.int32), found.swaps
        seconds = self._seconds(plan.origin, plan.rerun)
        for other in {row.tobytes(): row for row in (order, plan.order)}.values():
            again = self._swaps(plan.graph, other, seconds, added, limit, _LAST_WORK)
            if (again.peak_bytes, again.stall_seconds) < (swaps.peak_bytes, swaps.stall_seconds):
                order, swaps = other, again
        return self._swapped(plan, order, swaps)

    def _swapped(self, plan: BudgetPlan, order: NDArray[np.int32], swaps: Swaps) -> SwapPlan:
        rest = replace(self.options, time_limit=max(self._left(), _SWAP_SHARE * self.options.time_limit))
        asked = self.goal.record_with(self.link, self.host_bytes) | {"swap_state": self.state}
        return with_swaps(self.graph, order, swaps, rest, self.progress, plan, asked)

    def explained(self, plan: SwapPlan) -> SwapPlan:
        """Return the plan with its bounds and the time it took."""
        plan = _explained(self.graph, plan, self.recompute.rules, self.link, self._lasting(self.graph))
        seconds = {**plan.seconds, "total": time.perf_counter() - self.start}
        return replace(plan, seconds=seconds, details=(*plan.details, *self.left_out))

    def _refused(self, budget_bytes: int) -> BudgetError:
        graph = self.graph
        least = working_sets(graph, self.recompute.rules, self._lasting(graph))
        largest = np.argsort(-least, kind="stable")[:3]
        bound = int(least[largest[0]]) if len(least) else graph.resident_bytes
        reason = f"no plan was found that fits it; none needs less than {bound} bytes"
        remedy = f"{self.lowest_bytes} bytes, a longer time limit, or a faster link"
        if bound > budget_bytes:
            names = ", ".join(f"op {v} ({graph.op_names[v]})" for v in largest[least[largest] > budget_bytes])
            reason = f"no plan fits it, whatever is dropped or swapped: {names} forces at least {bound} bytes"
            reason += f", {graph.resident_bytes} of them for resident tensors" if graph.resident_bytes else ""
            remedy = "a smaller batch, fewer resident bytes, or another device"
        message = (
            f"the budget is {budget_bytes} bytes, and {reason}. The lowest found is {self.lowest_bytes}: try {remedy}"
        )
        return BudgetError(message, rule="budget", ids=tuple(map(int, largest)))
