"""SwapPlan: a plan whose graph copies tensors to host memory and back, on top of recomputation or alone; AutoSwap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla import _core, budget, pipeline
from olla.autoswap import SCORES, AutoSwap
from olla.budgetplan import BudgetPlan
from olla.budgets import Goal
from olla.check import check
from olla.errors import BudgetError, PlanError
from olla.graph import Graph
from olla.operators import Rules, rules
from olla.plan import Plan
from olla.swap import PCIE3, Link, Swaps, plan_swaps, swapped_graph

if TYPE_CHECKING:
    from olla.pipeline import Options, Progress, Source

_RECOMPUTE_SHARE = 0.6  # of the time limit
_SWAP_SHARE = 0.3  # of the time for recomputation: as much again for swaps, and for the layout
_SLOWDOWNS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # by recomputation, tried in turn until a budget is met


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SwapPlan(Plan):
    """A plan for a graph that swaps.

    Everything `Plan` says is about `graph`, the one with swaps. `olla.check` accepts the plan with the graph it was
    made from too: then it also proves that both compute the same.

    Attributes:
        graph: the graph with swaps; see `olla.swap.swapped_graph`.
        source_digest: digest of the original graph.
        origin: int32[graph.num_ops], op of the graph without swaps, which is the recomputation's where there is one;
            -1: a swap-out or a swap-in.
        swaps: what is swapped, and when.
        recomputation: the plan on top of which this swaps, or None.
        base_peak_bytes: the peak of the same order without swaps.
    """

    graph: Graph
    source_digest: str
    origin: NDArray[np.int32]
    swaps: Swaps
    recomputation: BudgetPlan | None
    base_peak_bytes: int

    def _to_object(self) -> dict[str, Any]:
        raise PlanError("plans that swap have no file format yet: save the graph with `plan.graph.save`", rule="file")

    @property
    def base_seconds(self) -> float:
        """Estimated time of the original ops."""
        return self.swaps.base_seconds if self.recomputation is None else self.recomputation.base_seconds

    @property
    def added_seconds(self) -> float:
        """Estimated time of ops that run again, and of waiting for copies."""
        again = 0.0 if self.recomputation is None else self.recomputation.added_seconds
        return again + self.swaps.stall_seconds

    @property
    def slowdown(self) -> float:
        """Added time as a share of the step's own."""
        return self.added_seconds / self.base_seconds if self.base_seconds > 0 else 0.0


def with_swaps(
    graph: Graph,
    order: NDArray[np.int32],
    swaps: Swaps,
    options: Options,
    progress: Progress | None,
    recomputation: BudgetPlan | None = None,
) -> SwapPlan:
    """Return the plan that swaps, laid out and checked.

    Args:
        graph: the training step.
        order: int32[n], what the swaps were chosen for: of that graph, or of the recomputation's.
        swaps: of that order.
        options: of the layout.
        progress: as in `olla.plan`.
        recomputation: the plan for whose graph the swaps were chosen.

    Raises:
        PlanError: the swaps are not those of the order.
    """
    without = graph if recomputation is None else recomputation.graph
    rewritten, origin = swapped_graph(without, order, swaps)
    program = np.arange(rewritten.num_ops, dtype=np.int32)
    kept: dict[str, Any] = {"method": "program", "precedences": (), "updates_may_move": True}  # the order says it all
    plan = pipeline.run(rewritten, replace(options, **kept, order=program), progress)
    swap_plan = SwapPlan(
        **vars(plan),
        graph=rewritten,
        source_digest=graph.digest,
        origin=origin,
        swaps=swaps,
        recomputation=recomputation,
        base_peak_bytes=int(_core.profile(without.core, order)[3]),
    )
    check(graph, swap_plan)
    return swap_plan


def autoswap(
    source: Source,
    options: Options,
    goal: Goal | None,
    *,
    device: Any = "a100",
    link: Link | float = PCIE3,
    score: str = "best",
    host_bytes: int | None = None,
    progress: Progress | None = None,
) -> SwapPlan:
    """Plan by AutoSwap, on the program order or the one in the options; see `olla.plan`.

    Args:
        source: what to plan.
        options: of `olla.plan`.
        goal: a budget: stick to the limit; a slowdown: least peak within it; none: no overhead.
        device: what seconds are estimated for.
        link: to host memory.
        score: one of `olla.autoswap.SCORES`, or "best".
        host_bytes: host memory there is.
        progress: as in `olla.plan`.

    Raises:
        BudgetError: the blocks do not suffice for the budget.
        ValueError: the score is unknown.
    """
    from olla.devices import profile_of

    if options.precedences:
        raise ValueError("precedences cannot be combined with swapping: add them to the graph as `after` of its ops")
    if score not in (*SCORES, "best"):
        raise ValueError(f"score is {score!r}, expected 'best' or one of {', '.join(SCORES)}")
    graph = pipeline.graph_of(source)
    order = np.arange(graph.num_ops, dtype=np.int32) if options.order is None else options.order.astype(np.int32)
    seconds = (goal.device if goal else profile_of(device)).op_seconds(graph)
    method = AutoSwap(graph, order, seconds, Link.of(link), host_bytes)
    names = SCORES if score == "best" else (score,)
    limit = goal.budget_bytes if goal else None
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
        slowdown = math.inf if goal and goal.minimise else (goal.max_slowdown or 0.0) if goal else 0.0
        best = min((method.least_peak(name, slowdown) for name in names), key=lambda swaps: swaps.peak_bytes)
    return with_swaps(graph, order, best, options, progress)


def run(
    source: Source,
    options: Options,
    goal: Goal,
    *,
    link: Link | float | None = None,
    host_bytes: int | None = None,
    progress: Progress | None = None,
    narrow: Callable[[Rules], Rules] | None = None,
) -> SwapPlan:
    """Plan towards a goal by recomputation, in-place results and, on top of them, swaps; see `olla.plan`.

    Swaps that make nobody wait are almost exactly additive to recomputation. So a slowdown is spent on recomputation,
    and what that leaves on waiting; a budget is met with as little recomputation as the swaps allow.

    Args:
        source: what to plan.
        options: of `olla.plan`.
        goal: what is asked for.
        link: to host memory; default: the device's.
        host_bytes: host memory there is.
        progress: as in `olla.plan`.
        narrow: takes from the rules of recomputation what whoever runs the plan cannot do.

    Raises:
        BudgetError: no plan was found that fits the budget.
    """
    graph = pipeline.graph_of(source)
    speed = Link.of(goal.device if link is None else link)
    search = _Combined(graph, options, goal, speed, host_bytes, progress, narrow)
    return search.slowed(goal, _RECOMPUTE_SHARE) if goal.budget_bytes is None else search.fitted(goal.budget_bytes)


class _Combined:
    """One call of `run`."""

    def __init__(
        self,
        graph: Graph,
        options: Options,
        goal: Goal,
        link: Link,
        host_bytes: int | None,
        progress: Progress | None,
        narrow: Callable[[Rules], Rules] | None = None,
    ) -> None:
        self.graph, self.options, self.goal, self.link = graph, options, goal, link
        self.host_bytes, self.progress, self.narrow = host_bytes, progress, narrow
        self.rules = rules(graph, goal.device)
        self.lowest_bytes = 2**62

    def slowed(self, goal: Goal, share: float, limit: int | None = None) -> SwapPlan:
        """Recompute within a slowdown, then swap; each takes its share of the time limit."""
        options, seconds = self.options, self.rules.seconds
        quick = replace(options, layout=False, time_limit=share * options.time_limit)
        plan = budget.run(self.graph, quick, goal, self.progress, self.narrow)
        spent = np.where(plan.rerun != 0, self.rules.rerun_seconds[plan.origin], seconds[plan.origin])
        left = max(0.0, (goal.max_slowdown or 0.0) - plan.slowdown) * float(seconds.sum())
        swaps = plan_swaps(
            plan.graph,
            plan.order,
            spent,
            self.link,
            limit=limit,
            max_slowdown=left / max(float(spent.sum()), 1e-30),
            host_bytes=self.host_bytes,
            time_limit=_SWAP_SHARE * quick.time_limit,
            seed=options.seed,
            progress=self.progress,
        )
        rest = replace(options, time_limit=_SWAP_SHARE * quick.time_limit)
        return with_swaps(self.graph, plan.order, swaps, rest, self.progress, plan)

    def fitted(self, budget_bytes: int) -> SwapPlan:
        """Allow more and more recomputation until everything fits, the arena included."""
        target = budget_bytes
        for slowdown in _SLOWDOWNS:
            goal = replace(self.goal, budget_bytes=None, max_slowdown=slowdown)
            plan = self.slowed(goal, _RECOMPUTE_SHARE / len(_SLOWDOWNS), target)
            excess = budget.needed_bytes(plan.graph, plan) - budget_bytes
            self.lowest_bytes = min(self.lowest_bytes, budget_bytes + excess)
            if excess <= 0:
                return plan
            if plan.peak_bytes <= budget_bytes:  # the layout alone does not fit
                target = min(target, plan.peak_bytes) - excess
        raise BudgetError(
            f"the budget is {budget_bytes} bytes, and no plan was found that fits it with recomputation and swapping. "
            f"The lowest found is {self.lowest_bytes}: try that, a longer time limit, or a faster link",
            rule="budget",
        )
