"""Planning a captured step towards a goal, and again where the arena with its workspaces does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from olla import _core, planner
from olla.base import Progress
from olla.errors import BudgetError, PlanError
from olla.graph import Graph, Rules, rules
from olla.plan import Chunked, Costs, Goal, Options, Plan, Request, Rewrite, Swapping, composed
from olla.pytorch.capture import Captured
from olla.pytorch.program.chunks import suits, with_chunks
from olla.pytorch.program.swapped import transfers
from olla.pytorch.program.variants import restrict_rules

_MAX_PLANS = 5  # of one step, each recorded once
_MAX_HOST_PLANS = 3  # until the host memory of the swaps fits, the last of them without any


class Planner:
    """Plans one captured step towards its goal.

    Args:
        captured: the step.
        goal: what is asked for.
        options: of olla.compile: time_limit, seed, updates_may_move.
        swapping: how the step may swap; None: not at all.

    Attributes:
        time_limit: seconds for one plan.
        replays: whether random numbers may be drawn again; a CUDA graph cannot set a generator's state.
        is_measured: whether swaps, if there are any, were chosen by measured op times.
        note: why no loss is in chunks where that was asked for; empty otherwise.
    """

    def __init__(
        self, captured: Captured, goal: Goal, options: dict[str, Any], swapping: Swapping | None, *, replays: bool
    ) -> None:
        self._captured = captured  # with its losses in chunks once a plan has them
        self._device = captured.device_type
        self.goal = goal
        self.replays = replays
        self.swapping = swapping
        self.time_limit: float = options["time_limit"]
        self._options = Options(layout=False, **options)
        self._num_plans = 0
        self._chunked: Chunked | None = None
        self._base_peak_bytes = 0  # of the step with whole losses
        self.note = ""
        self._spared_bytes = 0  # part of the budget set aside for gaps of the arena, which the peak leaves out
        self.is_measured = swapping is None

    def plan(self, progress: Progress | None) -> Plan:
        """Return the first plan of the step, which knows no workspaces of kernels.

        Raises:
            BudgetError: nothing fits the budget.
        """
        found = self._plan(None, self.goal, progress)
        if self.goal.chunked_loss is not None and found.chunked is None:
            self.note = found.message.partition(" Of the ")[0]  # says why
        return found

    def accept(self, found: Plan) -> None:
        """Raise a PlanError for a plan, perhaps written by another process, that this planner could not have made.

        `olla.check` proves that a plan fits the graph; only this knows whether the step has operators for what is
        recomputed and what is in place.

        Raises:
            PlanError: names an op that has no such variant.
        """
        if not found.rewrites:
            raise PlanError("the plan is for another goal", rule="plan")
        if found.chunked is not None and self.goal.chunked_loss is None:
            raise PlanError("the plan chunks losses, unlike its goal", rule="plan")
        below = found.recomputed
        if below is None or found.chunked is not None:
            return  # of chunks, every row runs once, by operators that olla writes
        source = self._captured.graph
        allowed = restrict_rules(self._captured, self._device, rules(source, self.goal.device), self.replays)
        again = below.rerun != 0
        wrong = again & (below.rerun != allowed.rerun[below.origin])
        num_mutated = np.diff(source.mutates.offset)[below.origin]
        over = np.diff(below.graph.mutates.offset) > num_mutated
        wrong |= over & ~again & (allowed.in_place[below.origin] == 0)
        if wrong.any():
            v = int(below.origin[np.flatnonzero(wrong)[0]])
            raise PlanError(f"op {v} ({source.op_names[v]}) cannot run as the plan says", rule="plan", ids=(v,))

    def prepared(self, found: Plan) -> Captured:
        """Return the step to run, with its losses in chunks where its plan has them; later plans have the same."""
        if self.goal.chunked_loss is not None and found.chunked is None and not self.note:
            self.note = "No loss was chunked, see the run that made the plan."
        self._chunked, self._base_peak_bytes = found.chunked, found.base_peak_bytes
        if found.chunked is not None:
            self._captured = with_chunks(self._captured, found.chunked)
        return self._captured

    def replan(self, costs: Costs, needed_bytes: int, peak_bytes: int, progress: Progress | None) -> Plan | None:
        """Return a tighter plan where the step took more than the budget; None where it fits.

        Towards a slowdown or the least peak: a plan with a lower peak, once. A step that swaps is planned again in any
        case, once its ops have been measured.

        Args:
            costs: measured, of the ops of the step to run.
            needed_bytes: what the recorded step takes, its arena included.
            peak_bytes: of its plan, workspaces included.

        Raises:
            BudgetError: nothing fits the budget.
        """
        total = self.goal.budget_bytes
        if self.swapping is None and total is None:
            return self._with_workspaces(costs, peak_bytes, progress)
        if total is None or needed_bytes <= total:
            if self.is_measured:
                return None
            self.is_measured = True
            with contextlib.suppress(BudgetError):  # the plan at hand fits
                return self._measured(costs, progress)
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
            return self._measured(costs, progress)
        except BudgetError as error:
            spared = f"{self._spared_bytes} of them for gaps between tensors in the arena"
            raise BudgetError(
                f"the step does not fit {total} bytes with the workspaces of its kernels, {spared}: {error}",
                rule=error.rule,
                ids=error.ids,
            ) from None

    def _with_workspaces(self, costs: Costs, peak_bytes: int, progress: Progress | None) -> Plan | None:
        """Return a plan with a lower peak now that workspaces are known, or None; the first one did not count them."""
        if self._num_plans > 0 or not costs.workspace_bytes.any():
            return None
        self._num_plans += 1
        costs = costs._replace(seconds=self._captured.graph.seconds)  # measured ones differ from run to run
        found = self._plan(costs, self.goal, progress)
        assert found.graph is not None
        for rewrite in rewrites_of(found):
            costs = costs.through(rewrite)
        peak: int = _core.profile(costs.on(found.graph).core, found.order).peak_bytes
        return found if peak < peak_bytes else None

    def _measured(self, costs: Costs, progress: Progress | None) -> Plan:
        """Return a plan made with what was measured."""
        goal, total = self.goal, self.goal.budget_bytes
        if total is not None:
            goal = dataclasses.replace(goal, budget_bytes=total - self._spared_bytes)
        found = self._plan(costs, goal, progress)
        self.is_measured = True
        return dataclasses.replace(found, goal={**found.goal, **self.goal.record()})

    def _plan(self, costs: Costs | None, goal: Goal, progress: Progress | None) -> Plan:
        original = self._captured.original or self._captured

        def restrict(rules: Rules, chunked: Chunked | None) -> Rules:
            runs = original if chunked is None else with_chunks(original, chunked)
            return restrict_rules(runs, self._device, rules, self.replays)

        if costs is not None and self._chunked is None:  # chunks were found to be of no use
            goal = dataclasses.replace(goal, chunked_loss=None)
        request = Request(
            graph=original.graph,
            options=self._options,
            goal=goal,
            swapping=self.swapping,
            progress=progress,
            suits=functools.partial(suits, original),
            chunked=self._chunked,
            restrict=restrict,
            costs=costs,
        )
        found = self._within_host_memory(request)
        return found if self._chunked is None else dataclasses.replace(found, base_peak_bytes=self._base_peak_bytes)

    def _within_host_memory(self, request: Request) -> Plan:
        """Plan with less host memory until the copies fit there with the gaps between them."""
        found = planner.run(request)
        swapping = request.swapping
        if swapping is None or swapping.host_bytes is None:
            return found
        host_bytes = swapping.host_bytes
        for left in reversed(range(_MAX_HOST_PLANS - 1)):
            excess = (transfers(found.swapped).host_bytes if found.swapped else 0) - swapping.host_bytes
            if excess <= 0:
                break
            host_bytes = max(1, host_bytes - excess) if left > 0 else 1
            fewer = dataclasses.replace(swapping, host_bytes=host_bytes)
            found = planner.run(dataclasses.replace(request, swapping=fewer))
        return found


def rewrites_of(found: Plan) -> list[Rewrite]:
    """Return the rewrites of a plan without the chunking of losses, which the captured step already has."""
    return [rewrite for rewrite in found.rewrites if rewrite is not found.chunked]


def captured_costs(graph: Graph, recorded: Graph, found: Plan) -> Costs:
    """Return the costs of the captured ops from those of a rewritten graph: the most of each op's runs."""
    ops = composed((rewrite.origin for rewrite in rewrites_of(found)), graph.num_ops)
    own = ops >= 0  # others are copies to or from the host
    costs = Costs(np.zeros(graph.num_ops, dtype=np.int64), np.zeros(graph.num_ops))
    np.maximum.at(costs.workspace_bytes, ops[own], recorded.workspace_bytes[own])
    np.maximum.at(costs.seconds, ops[own], recorded.seconds[own])
    return costs
