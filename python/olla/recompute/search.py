"""The way from a graph and a goal to a plan of a rewritten graph: order, drop, improve, order again, lay out, check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core, pipeline
from olla.base import Progress, rivals, watched
from olla.check.check import check
from olla.errors import BudgetError, SolverError
from olla.graph import Graph, Lists, Rerun, Rules, rules
from olla.graph.operators import without_replays
from olla.order.base_orders import base_orders, early_updates, induced
from olla.plan import BudgetPlan, Goal, Options, Plan

# What a search may do is limited in work, so that its results are the same on every machine; time limits it only where
# a caller leaves less than the work takes. A million units take about 10 ms of ordering, 60 ms of choosing.
_BASE_WORK = 60_000_000  # for the best order without rewriting
_ORDER_WORK = 15_000_000  # for that of one rewritten graph
_DROP_WORK = 40_000_000  # for one greedy run
_TRIAL_WORK = 4_000_000  # for one on a further base order
_IMPROVE_WORK, _IMPROVE_RUNS = 12_000_000, 6_000  # for improving the choice: in all, and per op
_RIVAL_SHARE = 1 / 2  # of that work, on a base order where the greedy ended better than on the first one
_REBASE_SHARE = 1 / 6  # of that work, on the order of the rewritten graph
_BASE_SHARE = 0.2  # of the time limit, by which that stage ends at the latest
_DROP_SHARE = 0.5
_IMPROVE_SHARE = 0.7
_LEAST_SHARE = 0.1  # of the time limit, that every stage gets however late it is: an answer that is late, but one
_PROGRAM_SHARE = 0.9
_BOUND_SHARE = 0.1  # of the time limit, for one lower bound
_CLOSE = 0.002  # a peak this near to its bound is not searched for further
_MAX_ROUNDS = 1000  # of the local search; work ends it earlier on all but small graphs
_NUM_SEED_OPS = 3  # whose bounds the local search starts from, too
_NUM_BOUND_OPS = 12  # per source of ops whose cuts make a bound
_ROUNDED_UP = 1 + 1e-12  # sums of seconds depend on their order
_MAX_LAYOUTS = 6  # rewritten graphs laid out until the arena fits


class _Start(NamedTuple):
    """A base order, and what is chosen on it."""

    order: NDArray[np.int32]
    evictor: _core.RecomputeSearch


class Run:
    """One call of `olla.plan` with a goal."""

    def __init__(
        self,
        graph: Graph,
        options: Options,
        goal: Goal,
        progress: Progress | None,
        narrow: Callable[[Rules], Rules] | None = None,
    ) -> None:
        self.start = time.perf_counter()
        self.graph, self.options, self.goal, self.progress = graph, options, goal, watched(progress)
        self.rules: Rules = rules(graph, goal.device, in_place=goal.in_place, recompute=goal.recompute)
        if narrow is not None:
            self.rules = narrow(self.rules)
        if options.method == "ilp":  # the integer program knows no draws that are repeated
            self.rules = without_replays(self.rules)
        self.base_seconds = float(self.rules.seconds.sum())
        self.interrupted = False
        self.lowest_bytes = 2**62
        self.improve_work = min(_IMPROVE_WORK, _IMPROVE_RUNS * graph.num_ops)
        self.notes: tuple[str, ...] = ()  # on the choice, for the plan's details
        self.left_out: list[str] = []
        limit = _BASE_SHARE * options.time_limit
        # An integer program chooses what to drop; the order it starts from is the best there is in either case.
        method = "auto" if options.method == "ilp" else options.method
        quick = replace(options, method=method, layout=False, time_limit=limit, max_work=_BASE_WORK)
        self.base: Plan = pipeline.run(graph, quick, self.progress)
        self.left_out += [line for line in self.base.details if line.startswith(rivals.LEFT_OUT)]
        self.first_order = self._base_order()
        self.starts = [self._start(self.first_order)]  # after a choice: the best first

    @property
    def order(self) -> NDArray[np.int32]:
        """The base order."""
        return self.starts[0].order

    @property
    def evictor(self) -> _core.RecomputeSearch:
        """What is chosen on it."""
        return self.starts[0].evictor

    def _start(self, order: NDArray[np.int32]) -> _Start:
        return _Start(order, self.rules.evictor(self.graph, order))

    @property
    def _movable(self) -> bool:
        """Whether any valid order will do as a base order."""
        return self.options.order is None and self.options.updates_may_move

    def _base_order(self) -> NDArray[np.int32]:
        """Return the best order, with weight updates early where that costs no memory: gradients then go at once."""
        if not self._movable:
            return self.base.order.copy()
        name, limit = "the best order with early updates", _BASE_SHARE * self.options.time_limit
        schedule = {name: lambda: early_updates(self.graph, self.base.order)}
        early = list(rivals.orders(self.graph.core, schedule, self.left_out).values()) or [self.base.order]
        found = _core.order(self.graph.core, early, limit, self.options.seed, self.progress, _ORDER_WORK)
        return found.order if found.peak_bytes <= self.base.peak_bytes else self.base.order.copy()

    def _left(self, share: float = 1.0) -> float:
        passed = time.perf_counter() - self.start
        return 0.0 if self.interrupted else max(0.0, share * self.options.time_limit - passed)

    def _until(self, share: float) -> float:
        """Return the seconds left to a share of the time limit, or the least that every stage gets."""
        return 0.0 if self.interrupted else max(self._left(share), _LEAST_SHARE * self.options.time_limit)

    def drop(self, peak_bytes: int, added_seconds: float, work: int = _DROP_WORK) -> None:
        """Drop values until the peak is reached, or no time may be added any more."""
        limit = self._until(_DROP_SHARE)
        self.interrupted |= self.evictor.run(peak_bytes, added_seconds, limit, self.progress, work)

    def choose(self, peak_bytes: int, added_seconds: float) -> None:
        """Drop values on several base orders; go on with the one where that ends best."""
        self.drop(peak_bytes, added_seconds)
        if not self._movable:
            return
        goal = None if peak_bytes > 0 else added_seconds
        starts = self.starts
        for order in base_orders(self.graph, self.base.order, self.left_out):
            if self.interrupted or self._left(_DROP_SHARE) <= 0.0 or self._close_enough(peak_bytes, goal):
                break
            with rivals.optional("a base order", self.left_out, self.progress):
                self.starts = [self._start(order)]
                self.drop(peak_bytes, added_seconds, _TRIAL_WORK)
                starts += self.starts
            self.starts = self._ranked(starts, peak_bytes)
        self.starts = self._ranked(starts, peak_bytes)

    @staticmethod
    def _ranked(starts: list[_Start], peak_bytes: int) -> list[_Start]:
        """Return what meets the peak first, with the least time; then the lowest."""
        return sorted(starts, key=lambda s: (max(s.evictor.peak - peak_bytes, 0), s.evictor.added_seconds))

    def improve(self, peak_bytes: int, added_seconds: float | None) -> None:
        """Search for less added time within the peak, or, given an added time, for a lower peak within that."""
        work, self.improve_work = self.improve_work, self.improve_work // 2  # what follows is a small step from here
        first = next((s for s in self.starts if s.order is self.first_order), self.starts[0])
        rival = self.starts[0]  # the greedy's end says only so much
        for start, share in ((first, 1.0), (rival, _RIVAL_SHARE))[: 1 if rival is first else 2]:
            self.starts = [start]
            if added_seconds is not None or start.evictor.peak <= peak_bytes:
                self._search(peak_bytes, added_seconds, int(share * work))
        self.starts = self._ranked([rival, first], peak_bytes)
        if self._movable:
            self._rebase(peak_bytes, added_seconds, int(_REBASE_SHARE * work))

    def _search(self, peak_bytes: int, added_seconds: float | None, work: int) -> None:
        """Improve what is in force on the present base order."""
        limit = self._until(_IMPROVE_SHARE)
        if limit <= 0.0 or self._close_enough(peak_bytes, added_seconds):
            return
        self.interrupted |= self.evictor.improve(
            added_seconds is None,
            peak_bytes,
            math.inf if added_seconds is None else added_seconds,
            self.options.seed,
            _MAX_ROUNDS,
            limit,
            self.progress,
            work,
            self._busiest_ops()[:_NUM_SEED_OPS].tolist(),
        )

    def _rebase(self, peak_bytes: int, added_seconds: float | None, work: int) -> None:
        """Choose anew on the best order of the rewritten graph; go on with that where it is better."""
        if self._left(_IMPROVE_SHARE) <= 0.0 or self._close_enough(peak_bytes, added_seconds):
            return
        before = self.starts
        with rivals.optional("the order of the rewritten graph", self.left_out, self.progress) as failed:
            graph, origin, *_ = self.rewritten()
            options = replace(self.options, layout=False, time_limit=self._until(_IMPROVE_SHARE), max_work=_ORDER_WORK)
            order = induced(self.graph, pipeline.run(graph, options, self.progress).order, origin)
            if order is None or np.array_equal(order, self.order):
                return
            self.starts = [self._start(order)]
            self.drop(peak_bytes, math.inf if added_seconds is None else added_seconds, _TRIAL_WORK)
            if added_seconds is not None or self.evictor.peak <= peak_bytes:
                self._search(peak_bytes, added_seconds, work)
        self.starts = before if failed else self._ranked([*before, *self.starts], peak_bytes)

    def _solve(self, peak_bytes: int, added_seconds: float | None) -> None:
        """With the method "ilp": solve the integer program of the choice, for the base order."""
        if self.options.method != "ilp" or self.interrupted:
            return
        from olla.recompute.ilp import solve_choice

        bound = 0.0
        if added_seconds is None:
            bound = self.least_added_seconds(peak_bytes)
        else:
            peak_bytes = self.least_peak(added_seconds)
        found = solve_choice(
            self.evictor,
            peak_bytes=peak_bytes,
            added_seconds=added_seconds,
            bound=bound,
            time_limit=self._until(_PROGRAM_SHARE),
            seed=self.options.seed,
            progress=self.progress,
        )
        self.interrupted |= bool(found.info["cancelled"])
        self.notes = (found.line(added_seconds is None),)

    def _close_enough(self, peak_bytes: int, added_seconds: float | None) -> bool:
        """Whether the bounds leave next to nothing to gain."""
        if added_seconds is None:
            gap = self.evictor.added_seconds - self.least_added_seconds(peak_bytes)
            return gap <= _CLOSE * self.base_seconds
        return self.evictor.peak <= (1 + _CLOSE) * self.least_peak(added_seconds)

    def least_peak(self, added_seconds: float) -> int:
        """Return bytes: no rewriting that adds at most these seconds has a lower peak."""
        peaks, _ = self.evictor.least_peak(self._busiest_ops(), added_seconds, self._bound_seconds(), None)
        return max(int(peaks.max(initial=0)), self.graph.resident_bytes)

    def least_added_seconds(self, peak_bytes: int) -> float:
        """Return seconds: no rewriting with at most this peak adds less."""
        seconds, _ = self.evictor.least_added_seconds(self._busiest_ops(), peak_bytes, self._bound_seconds(), None)
        return float(seconds.max(initial=0.0))

    def run(self) -> BudgetPlan:
        goal = self.goal
        if goal.budget_bytes is not None:
            return self._fit(goal.budget_bytes)
        added = math.inf if goal.max_slowdown is None else goal.max_slowdown * self.base_seconds * _ROUNDED_UP
        self.choose(0, added)
        self.improve(0, added)
        self._solve(0, added)
        return self.finish()

    def _fit(self, budget_bytes: int) -> BudgetPlan:
        """Lower the peak until the arena fits as well: fragmentation and rounding come on top of the peak."""
        target = budget_bytes
        for i in range(_MAX_LAYOUTS):
            self.drop(target, math.inf)
            if i == 0 or self.evictor.peak > target:
                self.choose(target, math.inf)
            if self.evictor.peak > target and self.least_peak(math.inf) <= target:
                self.improve(0, math.inf)  # the greedy stopped above what may be there
            if self.evictor.peak <= target:
                self.improve(target, None)
            self._solve(target, None)
            self.lowest_bytes = min(self.lowest_bytes, self.evictor.peak)
            if self.evictor.peak > target:
                break
            plan = self.finish()
            excess = needed_bytes(plan.graph, plan) - budget_bytes
            if excess <= 0:
                return plan
            target = min(target, plan.peak_bytes) - excess
        if self.least_peak(math.inf) <= budget_bytes:
            plan = self._least()
            if needed_bytes(plan.graph, plan) <= budget_bytes:
                return plan
        raise self._error(budget_bytes)

    def _least(self) -> BudgetPlan:
        """Return the plan of least peak, whatever time it adds, with what is proved for the budget."""
        goal = replace(self.goal, budget_bytes=None, minimise="peak")
        rest = replace(self.options, time_limit=self._left())
        plan = Run(self.graph, rest, goal, self.progress, lambda _: self.rules).run()
        self.lowest_bytes = min(self.lowest_bytes, needed_bytes(plan.graph, plan))
        return self._bounded(replace(plan, goal=self.goal.record()))

    def _error(self, budget_bytes: int) -> BudgetError:
        ops = self._busiest_ops()
        bounds, _ = self.evictor.least_peak(ops, math.inf, self._bound_seconds(), None)
        bound = max(int(bounds.max(initial=0)), self.graph.resident_bytes)
        forcing = ops[np.argsort(-bounds, kind="stable")][:3]
        names = ", ".join(
            f"op {v} ({self.graph.op_names[v]})" for v in forcing[bounds[np.argsort(-bounds)][:3] > budget_bytes]
        )
        if bound > budget_bytes:
            reason = f"no plan fits it: every one needs at least {bound} bytes"
            reason += f", {self.graph.resident_bytes} of them for resident tensors" if self.graph.resident_bytes else ""
            reason += f"; {names} forces this" if names else ""
            remedy = "a smaller batch, fewer resident bytes, or another device"
        else:
            reason = f"no plan was found that fits it; none needs less than {bound} bytes"
            remedy = f"{self.lowest_bytes} bytes, a longer time limit, or more levers"
        message = (
            f"the budget is {budget_bytes} bytes, and {reason}. The lowest found is {self.lowest_bytes}: try {remedy}"
        )
        return BudgetError(message, rule="budget", ids=tuple(map(int, forcing)))

    def _bound_seconds(self) -> float:
        return max(0.05, min(self._left(), _BOUND_SHARE * self.options.time_limit))

    def _busiest_ops(self, plan: BudgetPlan | None = None) -> NDArray[np.int32]:
        """Return ops of the graph with most live memory, in the base order and in a plan: their cuts bound best."""
        live = _core.profile(self.graph.core, self.order).live_bytes
        ops = [self.order[np.argsort(-live, kind="stable")][:_NUM_BOUND_OPS]]
        if plan is not None:
            live = _core.profile(plan.graph.core, plan.order).live_bytes
            ops.append(plan.origin[plan.order[np.argsort(-live, kind="stable")]][:_NUM_BOUND_OPS])
        return np.array(list(dict.fromkeys(np.concatenate(ops).tolist())), dtype=np.int32)

    def _bounded(self, plan: BudgetPlan) -> BudgetPlan:
        """Return the plan with what is proved about every other one."""
        ops = self._busiest_ops(plan)
        peaks, _ = self.evictor.least_peak(ops, plan.added_seconds, self._bound_seconds(), self.progress)
        budget_bytes = max(self.goal.budget_bytes or 0, plan.peak_bytes)
        seconds, _ = self.evictor.least_added_seconds(ops, budget_bytes, self._bound_seconds(), self.progress)
        peak_bound = max(int(peaks.max(initial=0)), self.graph.resident_bytes)
        seconds_bound = float(seconds.max(initial=0.0))
        if peak_bound > plan.peak_bytes or seconds_bound > plan.added_seconds:
            raise SolverError(
                f"a plan with {plan.peak_bytes} bytes and {plan.added_seconds} added seconds is below its lower bounds "
                f"({peak_bound} bytes, {seconds_bound} seconds): this is a defect of olla, please report it"
            )
        return replace(plan, peak_lower_bound_bytes=peak_bound, added_seconds_lower_bound=seconds_bound)

    def finish(self) -> BudgetPlan:
        graph, origin, rerun, tensor_origin = self.rewritten()
        options = replace(self.options, order=None, time_limit=self._until(1.0), max_work=_ORDER_WORK)
        plan = pipeline.run(graph, options, self.progress)
        again = rerun != Rerun.NEVER
        seconds, rerun_seconds = self.rules.seconds, self.rules.rerun_seconds
        added = math.fsum((*seconds[origin[~again]], *rerun_seconds[origin[again]], *-seconds))
        written = np.diff(self.graph.writes.offset)[origin]
        stages = {**plan.seconds, "total": time.perf_counter() - self.start}
        fields = {**vars(plan), "seconds": stages, "message": f"Of the rewritten graph: {plan.message}"}
        fields["details"] = (*plan.details, *self.notes, *self.left_out)
        budget_plan = BudgetPlan(
            **fields,
            graph=graph,
            source_digest=self.graph.digest,
            origin=origin,
            rerun=rerun,
            tensor_origin=tensor_origin,
            goal=self.goal.record(),
            base_peak_bytes=self.base.peak_bytes,
            base_seconds=self.base_seconds,
            added_seconds=max(0.0, added),
            added_seconds_lower_bound=0.0,
            peak_lower_bound_bytes=graph.resident_bytes,
            num_recomputed=graph.num_ops - self.graph.num_ops,
            num_in_place=int(np.sum((np.diff(graph.writes.offset) < written) & (rerun != Rerun.FIRST_RESULT))),
        )
        check(self.graph, budget_plan)
        return self._bounded(budget_plan)

    def rewritten(self) -> tuple[Graph, NDArray[np.int32], NDArray[np.uint8], NDArray[np.int32]]:
        made = self.evictor.rewritten()
        origin, rerun, tensor_origin = made.origin, made.rerun, made.tensor_origin
        old, r = self.graph, self.rules
        again = rerun != Rerun.NEVER
        share = np.divide(r.rerun_seconds, r.seconds, out=np.ones_like(r.seconds), where=r.seconds > 0)
        numbers = {name: getattr(old, name)[origin] for name in ("flops", "launches", "recomputable")}
        texts = {
            name: [getattr(old, name)[v] for v in origin] for name in ("op_names", "op_kinds", "targets", "shapes")
        }
        graph = Graph.from_arrays(
            name=old.name,
            tensor_bytes=made.tensor_bytes,
            donated=made.donated.astype(np.bool_),
            tensor_kinds=[old.tensor_kinds[t] for t in tensor_origin],
            tensor_names=[old.tensor_names[t] for t in tensor_origin],
            **{name: Lists(*getattr(made, name)) for name in ("reads", "writes", "mutates", "after")},
            workspace_bytes=made.workspace_bytes,
            seconds=old.seconds[origin] * np.where(again, share[origin], 1.0),
            moved_bytes=np.where(again, r.rerun_moved_bytes[origin], old.moved_bytes[origin]),
            random=made.random.astype(np.bool_),
            outputs=made.outputs,
            **numbers,
            **texts,
        )
        return graph, origin, rerun, tensor_origin


def needed_bytes(graph: Graph, plan: Plan) -> int:
    """Return what a plan takes in all: its arena and what lies outside of it; the peak where nothing was laid out."""
    outside = graph.resident_bytes + int(graph.tensor_bytes[graph.donated].sum())
    return max(plan.peak_bytes, plan.arena_bytes + outside if plan.arena_bytes else 0)
