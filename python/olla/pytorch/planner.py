"""Planning a captured step towards a budget, and again where the arena with its workspaces does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from olla import planner
from olla.base import Progress
from olla.chunk import Chunking, chunk
from olla.errors import BudgetError, PlanError
from olla.graph import DeviceProfile, Graph, Rules, profile_of, rules
from olla.plan import BudgetPlan, Goal, Options, Plan, Swapping, SwapPlan
from olla.pytorch.capture import Captured
from olla.pytorch.program.chunks import suits, with_chunks
from olla.pytorch.program.forms import narrowed
from olla.pytorch.program.swapped import transfers
from olla.report.step import BudgetReport, SwapReport

_AnyPlan = TypeVar("_AnyPlan", BudgetPlan, SwapPlan, BudgetPlan | SwapPlan)

_MAX_PLANS = 5  # of one step, each recorded once
_MAX_HOST_PLANS = 3  # until the host memory of the swaps fits, the last of them without any


class Planner:
    """Plans one captured step towards its goal.

    Args:
        goal: what is asked for; None: least peak at no overhead, by AutoSwap.
        options: of olla.compile: time_limit, seed, updates_may_move.
        swapping: how the step may swap; None: not at all.
        device: what seconds are estimated for, where there is no goal.

    Attributes:
        time_limit: seconds for one plan.
        replays: whether random numbers may be drawn again; a CUDA graph cannot set a generator's state.
        is_measured: whether copies, if there are any, were chosen by the seconds of ops that ran.
        note: why no loss is in chunks where that was asked for; empty otherwise.
    """

    def __init__(
        self,
        goal: Goal | None,
        options: dict[str, Any],
        swapping: Swapping | None = None,
        by_autoswap: bool = False,
        device: str | DeviceProfile = "a100",
        *,
        replays: bool = True,
    ) -> None:
        self.goal = goal
        self.replays = replays
        self.swapping = swapping
        self._by_autoswap = by_autoswap
        self._profile = device
        self.time_limit: float = options["time_limit"]
        self._options = Options(layout=False, **options)
        self._num_plans = 0
        self._chunking: Chunking | None = None
        self.note = ""
        self._spared_bytes = 0  # of the budget, for what the peak does not hold: gaps of the arena
        self.is_measured = swapping is None

    @property
    def budget_bytes(self) -> int | None:
        """What resident tensors, outputs and the arena must fit."""
        return self.goal.budget_bytes if self.goal else None

    def plan(
        self, captured: Captured, device: str, progress: Progress | None
    ) -> tuple[Captured, BudgetPlan | SwapPlan]:
        """Return the step to run, with its losses in chunks where the goal says so, and its first plan.

        That one knows no workspaces of kernels.

        Raises:
            BudgetError: nothing fits the budget.
        """
        if self.goal is not None and self.goal.chunked_loss is not None:
            found = chunk(captured.graph, self._options, self.goal, progress, functools.partial(suits, captured))
            if isinstance(found, Chunking):
                self._chunking = found
                captured = with_chunks(captured, found.chunks)
            else:
                self.note = f"No loss was chunked: {found}."
        plan = self._plan(captured, captured.graph, device, self.goal, progress)
        return captured, self._told(plan)

    def accept(self, captured: Captured, device: str, found: Plan) -> None:
        """Refuse a plan, which somebody else may have written, that this planner could not have made.

        What `olla.check` proves is that a plan fits the graph; that the step has forms for what runs again and what is
        in place is known here alone.

        Raises:
            PlanError: names an op that has no such form.
        """
        if not isinstance(found, BudgetPlan | SwapPlan):
            raise PlanError("the plan is for another goal", rule="plan")
        if (found.chunked is not None) != (self.goal is not None and self.goal.chunked_loss is not None):
            raise PlanError("the plan chunks losses, or does not, unlike its goal", rule="plan")
        below = found if isinstance(found, BudgetPlan) else found.recomputation
        if below is None or below.chunked is not None:
            return  # of chunks, every row runs once, by operators that olla writes
        source = captured.graph
        profile = self.goal.device if self.goal is not None else profile_of(self._profile)
        allowed = narrowed(captured, device, rules(source, profile), self.replays)
        again = below.rerun != 0
        wrong = again & (below.rerun != allowed.rerun[below.origin])
        num_mutated = np.diff(source.mutates.offset)[below.origin]
        over = np.diff(below.graph.mutates.offset) > num_mutated
        wrong |= over & ~again & (allowed.in_place[below.origin] == 0)
        if wrong.any():
            v = int(below.origin[np.flatnonzero(wrong)[0]])
            raise PlanError(f"op {v} ({source.op_names[v]}) cannot run as the plan says", rule="plan", ids=(v,))

    def known(self, captured: Captured, found: Plan) -> Captured:
        """Return the step to run for a plan that was made before."""
        if isinstance(found, BudgetPlan | SwapPlan) and found.chunked is not None:
            assert self.goal is not None
            self._chunking = Chunking.of_plan(found, self.goal.device)
            return with_chunks(captured, found.chunked)
        if self.goal is not None and self.goal.chunked_loss is not None:
            self.note = "No loss was chunked, see the run that made the plan."
        return captured

    def again(
        self,
        captured: Captured,
        costs: Graph,
        device: str,
        needed_bytes: int,
        peak_bytes: int,
        progress: Progress | None,
    ) -> BudgetPlan | SwapPlan | None:
        """Return a tighter plan where the step took more than the budget; None where it fits.

        Towards a slowdown or the least peak: a plan with a lower peak, once. A step that swaps is planned again in any
        case, once its ops have been measured.

        Args:
            captured: the step.
            costs: its graph, with workspaces and seconds.
            device: type of the device.
            needed_bytes: what the recorded step takes, its arena included.
            peak_bytes: of its plan, workspaces included.
            progress: see olla.plan.

        Raises:
            BudgetError: nothing fits the budget.
        """
        total = self.budget_bytes
        if self.swapping is None and self.goal is not None and total is None:
            return self._with_workspaces(captured, costs, device, self.goal, peak_bytes, progress)
        if total is None or needed_bytes <= total:
            if self.is_measured:
                return None
            self.is_measured = True
            with contextlib.suppress(BudgetError):  # the plan at hand fits
                return self._measured(captured, costs, device, progress)
            return None
        self._num_plans += 1
        self._spared_bytes = max(self._spared_bytes, needed_bytes - peak_bytes)
        if self._num_plans >= _MAX_PLANS or self._spared_bytes >= total:
            raise BudgetError(
                f"the budget is {total} bytes, and no plan was found whose arena fits it with the workspaces of "
                f"kernels: the last one needs {needed_bytes} bytes. Try {needed_bytes} bytes or a smaller batch",
                rule="budget",
            )
        try:
            found = self._measured(captured, costs, device, progress)
        except BudgetError as error:
            spared = f"{self._spared_bytes} of them for gaps between tensors in the arena"
            raise BudgetError(
                f"the step does not fit {total} bytes with the workspaces of its kernels, {spared}: {error}",
                rule=error.rule,
                ids=error.ids,
            ) from None
        return found

    def _with_workspaces(
        self, captured: Captured, costs: Graph, device: str, goal: Goal, peak_bytes: int, progress: Progress | None
    ) -> BudgetPlan | SwapPlan | None:
        """Return a plan with a lower peak now that workspaces are known, or None; the first one did not count them."""
        if self._num_plans > 0 or not costs.workspace_bytes.any():
            return None
        self._num_plans += 1
        graph = dataclasses.replace(costs, seconds=captured.graph.seconds)  # measured ones differ from run to run
        found = self._plan(captured, graph, device, goal, progress)
        return self._told(without_costs(found, captured.graph)) if found.peak_bytes < peak_bytes else None

    def _measured(
        self, captured: Captured, costs: Graph, device: str, progress: Progress | None
    ) -> BudgetPlan | SwapPlan:
        """Return a plan made with what was measured."""
        goal, total = self.goal, self.budget_bytes
        if goal is not None and total is not None:
            goal = dataclasses.replace(goal, budget_bytes=total - self._spared_bytes)
        found = self._told(without_costs(self._plan(captured, costs, device, goal, progress), captured.graph))
        self.is_measured = True
        if isinstance(found, BudgetPlan) and self.goal is not None:
            return dataclasses.replace(found, goal=self.goal.record())
        return found

    def _plan(
        self, captured: Captured, graph: Graph, device: str, goal: Goal | None, progress: Progress | None
    ) -> BudgetPlan | SwapPlan:
        def narrow(rules: Rules) -> Rules:
            return narrowed(captured, device, rules, self.replays)

        if goal is not None and goal.chunked_loss is not None:
            goal = self._chunking.goal(goal) if self._chunking else dataclasses.replace(goal, chunked_loss=None)
        if self.swapping is None:
            assert goal is not None
            return planner.recomputed(graph, self._options, goal, progress, narrow)
        host_bytes = self.swapping.host_bytes
        for left in reversed(range(_MAX_HOST_PLANS)):
            allowed = dataclasses.replace(self.swapping, host_bytes=host_bytes)
            if self._by_autoswap or goal is None:
                found = planner.by_autoswap(graph, self._options, goal, allowed, progress, device=self._profile)
            else:
                found = planner.with_swaps(graph, self._options, goal, allowed, progress, narrow)
            needed = transfers(found).host_bytes
            if self.swapping.host_bytes is None or host_bytes is None or needed <= self.swapping.host_bytes:
                break
            excess = needed - self.swapping.host_bytes  # gaps between the copies in host memory
            host_bytes = max(1, host_bytes - excess) if left > 1 else 1
        return found

    def _told(self, found: _AnyPlan) -> _AnyPlan:
        """Return a plan of the step to run as one of the step that was captured."""
        return found if self._chunking is None or self.goal is None else self._chunking.told(found, self.goal)


def captured_ops(found: BudgetPlan | SwapPlan) -> NDArray[np.int32]:
    """Return the op of the captured graph that each op of a rewriting stands for; -1: a copy to or from the host."""
    if isinstance(found, BudgetPlan):
        return found.origin
    below = found.recomputation
    return found.origin if below is None else np.where(found.origin < 0, -1, below.origin[found.origin])


def without_costs(found: _AnyPlan, graph: Graph) -> _AnyPlan:
    """Return a plan made with workspaces and seconds as one of the same rewriting without them.

    Args:
        found: the plan.
        graph: the original, without them.
    """
    ops = captured_ops(found)
    plain = dataclasses.replace(
        found.graph,
        workspace_bytes=np.where(ops < 0, 0, graph.workspace_bytes[ops]),
        seconds=np.where(ops < 0, 0.0, graph.seconds[ops]),
    )
    options = {name: found.options[name] for name in ("seed", "updates_may_move")}
    kept = planner.plan(plain, order=found.order, layout=False, time_limit=0.0, **options)
    same = dataclasses.replace(kept, method=found.method, options=found.options, seconds=found.seconds)
    rest: Any = dataclasses.replace(with_figures(found, plain, same), source_digest=graph.digest)
    if isinstance(found, SwapPlan) and found.recomputation is not None:
        rest = dataclasses.replace(rest, recomputation=without_costs(found.recomputation, graph))
    return cast("_AnyPlan", rest)


def with_figures(found: _AnyPlan, graph: Graph, figures: Plan) -> _AnyPlan:
    """Return the plan of a rewriting with the order and the figures of another plan of its rewritten graph.

    Args:
        found: says what was rewritten.
        graph: the rewritten graph, with other costs.
        figures: a plan of that graph.
    """
    fields = {field.name: getattr(figures, field.name) for field in dataclasses.fields(Plan)}
    return dataclasses.replace(found, graph=graph, **fields)


def original_costs(graph: Graph, rewritten: Graph, found: BudgetPlan | SwapPlan) -> Graph:
    """Return the original graph with the workspaces and seconds of a rewritten one: the most of each op's runs.

    Args:
        graph: the original.
        rewritten: with costs.
        found: says which op stands for which.
    """
    ops = captured_ops(found)
    own = ops >= 0
    workspace_bytes = np.zeros(graph.num_ops, dtype=np.int64)
    seconds = np.zeros(graph.num_ops)
    np.maximum.at(workspace_bytes, ops[own], rewritten.workspace_bytes[own])
    np.maximum.at(seconds, ops[own], rewritten.seconds[own])
    return dataclasses.replace(graph, workspace_bytes=workspace_bytes, seconds=seconds)


def added_seconds(seconds: NDArray[np.float64], found: BudgetPlan | SwapPlan) -> float:
    """Return the time of the runs beyond one of each op.

    Args:
        seconds: float64[n], of each op of the rewritten graph.
        found: says which of them run again.
    """
    if isinstance(found, SwapPlan):
        below, is_op = found.recomputation, found.origin >= 0
        return 0.0 if below is None else added_seconds(seconds[is_op][np.argsort(found.origin[is_op])], below)
    again = found.rerun != 0
    num_runs = np.bincount(found.origin, minlength=int(found.origin.max(initial=-1)) + 1)
    own = np.bincount(found.origin[~again], minlength=len(num_runs))
    runs = np.bincount(found.origin[again], weights=seconds[again], minlength=len(num_runs))
    of_again = num_runs - own
    mean = np.divide(runs, of_again, out=np.zeros(len(num_runs)), where=of_again > 0)
    extra = np.where(own > 0, runs, runs - mean)
    return float(extra.sum())


def budget_report(
    found: Plan, budget_bytes: int | None, seconds: NDArray[np.float64], stall_seconds: float | None
) -> BudgetReport | None:
    """Return what a budget or swaps made of a step, for its report; None where nothing was rewritten.

    Args:
        found: the plan.
        budget_bytes: the budget, if there is one.
        seconds: float64[n], as recorded of each op; zeros where nothing was.
        stall_seconds: that ops waited for copies in the latest step, if known.
    """
    if not isinstance(found, BudgetPlan | SwapPlan):
        return None
    recorded = float(seconds[captured_ops(found) >= 0].sum())
    again = added_seconds(seconds, found)
    added = again + (stall_seconds or 0.0) if recorded else None
    return BudgetReport(
        budget_bytes=budget_bytes,
        unbudgeted_peak_bytes=found.base_peak_bytes,
        peak_lower_bound_bytes=found.peak_lower_bound_bytes,
        num_recomputed=found.num_recomputed,
        num_in_place=found.num_in_place,
        planned_slowdown=found.slowdown,
        measured_slowdown=None if added is None else added / max(recorded - again, 1e-12),
        measured_added_seconds=added,
        num_chunked_losses=0 if found.chunked is None else found.chunked.num_losses,
    )


def swap_report(
    found: Plan, host_bytes: int, host_budget_bytes: int | None, stall_seconds: float | None
) -> SwapReport | None:
    """Return what was swapped, for a step's report; None where its plan does not swap."""
    if not isinstance(found, SwapPlan):
        return None
    return SwapReport(
        num_swaps=len(found.swaps.tensor),
        swapped_bytes=found.swaps.swapped_bytes,
        host_bytes=host_bytes,
        host_budget_bytes=host_budget_bytes,
        planned_stall_seconds=found.swaps.stall_seconds,
        measured_stall_seconds=stall_seconds,
    )
