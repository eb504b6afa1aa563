"""Swaps for `olla.plan`: on top of recomputation towards a goal, or by AutoSwap."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from olla import budget, pipeline
from olla.autoswap import SCORES, AutoSwap
from olla.budgets import Goal, Swapping
from olla.errors import BudgetError
from olla.graph import Graph
from olla.operators import Rules, rules
from olla.swap import PCIE3, Link, plan_swaps
from olla.swapbound import bounded
from olla.swapplan import SwapDecision, SwapPlan, with_swaps

if TYPE_CHECKING:
    from olla.pipeline import Options, Progress, Source

_RECOMPUTE_SHARE = 0.6  # of the time limit
_SWAP_SHARE = 0.3  # of the time for recomputation: as much again for swaps, and for the layout
_SLOWDOWNS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # by recomputation, tried in turn until a budget is met


def asked_for(goal: Goal, link: Link, host_bytes: int | None) -> dict[str, Any]:
    """Return a goal with the link and the host budget, as a plan keeps it."""
    speeds = {f"link_{name}": value for name, value in vars(link).items()}
    host = {} if host_bytes is None else {"host_budget_bytes": host_bytes}
    return {**goal.record(), **speeds, **host}


def autoswap(
    source: Source,
    options: Options,
    goal: Goal | None,
    swapping: Swapping,
    *,
    device: Any = "a100",
    score: str = "best",
    progress: Progress | None = None,
) -> SwapPlan:
    """Plan by AutoSwap, on the program order or the one in the options; see `olla.plan`.

    Args:
        source: what to plan.
        options: of `olla.plan`.
        goal: a budget: stick to the limit; a slowdown: least peak within it; none: no overhead.
        swapping: the link and the host memory.
        device: what seconds are estimated for, where there is no goal.
        score: one of `olla.autoswap.SCORES`, or "best".
        progress: as in `olla.plan`.

    Raises:
        BudgetError: the blocks do not suffice for the budget.
        ValueError: the score is unknown.
    """
    if options.precedences:
        raise ValueError("precedences cannot be combined with swapping: add them to the graph as `after` of its ops")
    if score not in (*SCORES, "best"):
        raise ValueError(f"score is {score!r}, expected 'best' or one of {', '.join(SCORES)}")
    graph, host_bytes = pipeline.graph_of(source), swapping.host_bytes
    speed = Link.of(PCIE3 if swapping.link is None else swapping.link)
    goal = goal or Goal.of(None, 0.0, None, device, False, False)
    assert goal is not None
    order = np.arange(graph.num_ops, dtype=np.int32) if options.order is None else options.order.astype(np.int32)
    method = AutoSwap(graph, order, goal.device.op_seconds(graph), speed, host_bytes)
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
    plan = with_swaps(graph, order, best, options, progress, goal=asked_for(goal, speed, host_bytes))
    return _explained(graph, plan, rules(graph, goal.device, in_place=False, recompute=False), speed)


def run(
    source: Source,
    options: Options,
    goal: Goal,
    swapping: Swapping,
    *,
    progress: Progress | None = None,
) -> SwapPlan:
    """Plan towards a goal by recomputation, in-place results and, on top of them, swaps; see `olla.plan`.

    Swaps that make nobody wait are almost exactly additive to recomputation. So a slowdown is spent on recomputation,
    and what that leaves on waiting; a budget is met with as little recomputation as the swaps allow.

    Args:
        source: what to plan.
        options: of `olla.plan`.
        goal: what is asked for.
        swapping: the link and the host memory.
        progress: as in `olla.plan`.

    Raises:
        BudgetError: no plan was found that fits the budget.
    """
    graph = pipeline.graph_of(source)
    link = Link.of(goal.device if swapping.link is None else swapping.link)
    search = _Combined(graph, options, goal, link, swapping.host_bytes, progress)
    plan = search.slowed(goal, _RECOMPUTE_SHARE) if goal.budget_bytes is None else search.fitted(goal.budget_bytes)
    return _explained(graph, plan, search.rules, search.link)


def _explained(graph: Graph, plan: SwapPlan, may: Rules, link: Link) -> SwapPlan:
    """Return the plan with its bounds, and a line on every tensor that is swapped."""
    swapped = (line for line in plan.decisions(graph, may) if isinstance(line, SwapDecision))
    return replace(bounded(graph, plan, may, link), details=(*plan.details, *map(str, swapped)))


class _Combined:
    """One call of `run`."""

    def __init__(
        self, graph: Graph, options: Options, goal: Goal, link: Link, host_bytes: int | None, progress: Progress | None
    ) -> None:
        self.graph, self.options, self.goal, self.link = graph, options, goal, link
        self.host_bytes, self.progress = host_bytes, progress
        self.rules = rules(graph, goal.device)
        self.lowest_bytes = 2**62

    def slowed(self, goal: Goal, share: float, limit: int | None = None) -> SwapPlan:
        """Recompute within a slowdown, then swap; each takes its share of the time limit."""
        options, seconds = self.options, self.rules.seconds
        quick = replace(options, layout=False, time_limit=share * options.time_limit)
        plan = budget.run(self.graph, quick, goal, self.progress)
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
        asked = asked_for(self.goal, self.link, self.host_bytes)
        return with_swaps(self.graph, plan.order, swaps, rest, self.progress, plan, asked)

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
