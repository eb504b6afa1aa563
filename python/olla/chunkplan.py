"""Plans with chunked losses: the goal of the original step, as a goal of its chunked graph, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from olla import pipeline
from olla.budgetplan import BudgetPlan
from olla.budgets import Goal
from olla.check import check
from olla.chunked import Chunked, chunked
from olla.graph import Graph
from olla.swapplan import SwapPlan

if TYPE_CHECKING:
    from olla.pipeline import Options, Progress

_BASE_SHARE = 0.1  # of the time limit, for the best order of the original

AnyPlan = TypeVar("AnyPlan", BudgetPlan, SwapPlan)


def run(
    graph: Graph,
    options: Options,
    goal: Goal,
    progress: Progress | None,
    search: Callable[[Graph, Options, Goal], AnyPlan],
) -> AnyPlan:
    """Plan a graph towards a goal with its losses in chunks; without, where that is of no use to the goal.

    The chunks are made before the search and stay: added times count from the original step, bounds hold for all
    rewritings of the chunked graph.

    Args:
        graph: the training step.
        options, goal, progress: as in `olla.budget.run`; the goal says how many chunks.
        search: plans a graph towards a goal without chunks.
    """
    start = time.perf_counter()
    assert goal.chunked_loss is not None
    parts = chunked(graph, goal.chunked_loss)
    base_seconds = float(goal.device.op_seconds(graph).sum())
    extra_seconds = float(goal.device.op_seconds(parts.graph).sum()) - base_seconds
    order_only = replace(options, layout=False, time_limit=_BASE_SHARE * options.time_limit)
    base_peak = pipeline.run(graph, order_only, progress).peak_bytes
    useless = _useless(parts, goal, base_seconds, extra_seconds, base_peak)
    passed = time.perf_counter() - start
    options = replace(options, time_limit=max(0.0, options.time_limit - passed))
    unchunked = replace(goal, chunked_loss=None)
    if useless:
        found = search(graph, options, unchunked)
        asked = {**found.goal, **goal.record()}
        return replace(found, goal=asked, message=f"No loss was chunked: {useless}. {found.message}")
    if goal.max_slowdown is not None:
        left = goal.max_slowdown * base_seconds - extra_seconds
        unchunked = replace(unchunked, max_slowdown=left / (base_seconds + extra_seconds))
    found = search(parts.graph, options, unchunked)
    below = found if isinstance(found, BudgetPlan) else found.recomputation
    assert below is not None

    def later(seconds: float) -> float:
        return max(0.0, seconds + extra_seconds)

    def of_original(plan: BudgetPlan | SwapPlan) -> dict[str, Any]:
        return {
            "source_digest": graph.digest,
            "base_peak_bytes": base_peak,
            "goal": {**plan.goal, **goal.record()},
            "added_seconds_lower_bound": later(plan.added_seconds_lower_bound),
            "seconds": {**plan.seconds, "total": time.perf_counter() - start},
        }

    times: dict[str, Any] = {"base_seconds": base_seconds, "added_seconds": later(below.added_seconds)}
    below = replace(below, **of_original(below), **times, chunked=parts)
    plan = below if isinstance(found, BudgetPlan) else replace(found, **of_original(found), recomputation=below)
    check(graph, plan)
    return plan


def _useless(parts: Chunked, goal: Goal, base_seconds: float, extra_seconds: float, base_peak: int) -> str:
    """Say why chunks do not serve the goal; empty where they may."""
    if parts.num_losses == 0:
        return "none was found whose linear layer and mean or summed cross-entropy stand alone, with large logits"
    if goal.max_slowdown is not None and extra_seconds > goal.max_slowdown * base_seconds:
        return f"chunks alone add {extra_seconds / base_seconds:.2%} to the time of the step"
    if goal.budget_bytes is not None and base_peak <= goal.budget_bytes:
        return "the step fits without"
    return ""
