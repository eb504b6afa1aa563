"""Planning a captured step towards a budget, and again where the arena with its workspaces does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla import budget
from olla.budgetplan import BudgetPlan
from olla.budgets import Goal
from olla.errors import BudgetError
from olla.graph import Graph
from olla.operators import Rules
from olla.pipeline import Options, Progress
from olla.plan import Plan, plan
from olla.pytorch.capture import Captured
from olla.pytorch.forms import narrowed

_MAX_PLANS = 5  # of one step, each recorded once


class Planner:
    """Plans one captured step towards its goal.

    Args:
        goal: what is asked for.
        options: of olla.compile: time_limit, seed, updates_may_move.

    Attributes:
        time_limit: seconds for one plan.
    """

    def __init__(self, goal: Goal, options: dict[str, Any]) -> None:
        self.goal = goal
        self.time_limit: float = options["time_limit"]
        self._options = Options(layout=False, **options)
        self._num_plans = 0
        self._spared_bytes = 0  # of the budget, for what the peak does not hold: gaps of the arena

    def plan(self, captured: Captured, device: str, progress: Progress | None) -> BudgetPlan:
        """Return the first plan; it knows no workspaces of kernels.

        Raises:
            BudgetError: nothing fits the budget.
        """
        return self._plan(captured, captured.graph, device, self.goal, progress)

    def again(
        self,
        captured: Captured,
        costs: Graph,
        device: str,
        needed_bytes: int,
        peak_bytes: int,
        progress: Progress | None,
    ) -> BudgetPlan | None:
        """Return a tighter plan where the step took more than the budget; None where it fits.

        Towards another goal: a plan with a lower peak, once.

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
        total = self.goal.budget_bytes
        if total is None:
            return self._with_workspaces(captured, costs, device, peak_bytes, progress)
        if needed_bytes <= total:
            return None
        self._num_plans += 1
        self._spared_bytes = max(self._spared_bytes, needed_bytes - peak_bytes)
        if self._num_plans >= _MAX_PLANS or self._spared_bytes >= total:
            raise BudgetError(
                f"the budget is {total} bytes, and no plan was found whose arena fits it with the workspaces of "
                f"kernels: the last one needs {needed_bytes} bytes. Try {needed_bytes} bytes or a smaller batch",
                rule="budget",
            )
        goal = dataclasses.replace(self.goal, budget_bytes=total - self._spared_bytes)
        try:
            found = self._plan(captured, costs, device, goal, progress)
        except BudgetError as error:
            spared = f"{self._spared_bytes} of them for gaps between tensors in the arena"
            raise BudgetError(
                f"the step does not fit {total} bytes with the workspaces of its kernels, {spared}: {error}",
                rule=error.rule,
                ids=error.ids,
            ) from None
        return dataclasses.replace(without_costs(found, captured.graph), goal=self.goal.record())

    def _with_workspaces(
        self, captured: Captured, costs: Graph, device: str, peak_bytes: int, progress: Progress | None
    ) -> BudgetPlan | None:
        """Return a plan with a lower peak now that workspaces are known, or None; the first one did not count them."""
        if self._num_plans > 0 or not costs.workspace_bytes.any():
            return None
        self._num_plans += 1
        graph = dataclasses.replace(costs, seconds=captured.graph.seconds)  # measured ones differ from run to run
        found = self._plan(captured, graph, device, self.goal, progress)
        return without_costs(found, captured.graph) if found.peak_bytes < peak_bytes else None

    def _plan(self, captured: Captured, graph: Graph, device: str, goal: Goal, progress: Progress | None) -> BudgetPlan:
        def narrow(rules: Rules) -> Rules:
            return narrowed(captured, device, rules)

        return budget.run(graph, self._options, goal, progress, narrow)


def without_costs(found: BudgetPlan, graph: Graph) -> BudgetPlan:
    """Return a plan made with workspaces and seconds as one of the same rewriting without them.

    Args:
        found: the plan.
        graph: the original, without them.
    """
    plain = dataclasses.replace(
        found.graph,
        workspace_bytes=graph.workspace_bytes[found.origin],
        seconds=graph.seconds[found.origin],
    )
    options = {name: found.options[name] for name in ("seed", "updates_may_move")}
    kept = plan(plain, order=found.order, layout=False, time_limit=0.0, **options)
    same = dataclasses.replace(kept, method=found.method, options=found.options, seconds=found.seconds)
    return dataclasses.replace(with_figures(found, plain, same), source_digest=graph.digest)


def with_figures(found: BudgetPlan, graph: Graph, figures: Plan) -> BudgetPlan:
    """Return a budget plan with the order and the figures of another plan of its rewritten graph.

    Args:
        found: says what was rewritten.
        graph: the rewritten graph, with other costs.
        figures: a plan of that graph.
    """
    fields = {field.name: getattr(figures, field.name) for field in dataclasses.fields(Plan)}
    return dataclasses.replace(found, graph=graph, **fields)


def original_costs(graph: Graph, rewritten: Graph, found: BudgetPlan) -> Graph:
    """Return the original graph with the workspaces and seconds of a rewritten one: the most of each op's runs.

    Args:
        graph: the original.
        rewritten: with costs.
        found: says which op stands for which.
    """
    workspace_bytes = np.zeros(graph.num_ops, dtype=np.int64)
    seconds = np.zeros(graph.num_ops)
    np.maximum.at(workspace_bytes, found.origin, rewritten.workspace_bytes)
    np.maximum.at(seconds, found.origin, rewritten.seconds)
    return dataclasses.replace(graph, workspace_bytes=workspace_bytes, seconds=seconds)


def added_seconds(seconds: NDArray[np.float64], found: BudgetPlan) -> float:
    """Return the time of the runs beyond one of each op.

    Args:
        seconds: float64[n], of each op of the rewritten graph.
        found: says which of them run again.
    """
    again = found.rerun != 0
    num_runs = np.bincount(found.origin, minlength=int(found.origin.max(initial=-1)) + 1)
    own = np.bincount(found.origin[~again], minlength=len(num_runs))
    runs = np.bincount(found.origin[again], weights=seconds[again], minlength=len(num_runs))
    of_again = num_runs - own
    mean = np.divide(runs, of_again, out=np.zeros(len(num_runs)), where=of_again > 0)
    extra = np.where(own > 0, runs, runs - mean)
    return float(extra.sum())
