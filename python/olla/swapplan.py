"""SwapPlan: a plan whose graph copies tensors to host memory and back; AutoSwap by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla import pipeline
from olla.autoswap import SCORES, AutoSwap
from olla.budgets import Goal
from olla.check import check
from olla.errors import BudgetError
from olla.graph import Graph
from olla.plan import Plan
from olla.swap import PCIE3, Link, Swaps, plan_swaps, swapped_graph

if TYPE_CHECKING:
    from olla.pipeline import Options, Progress, Source

_SWAP_SHARE = 0.5  # of the time limit


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SwapPlan(Plan):
    """A plan for a graph that swaps.

    Everything `Plan` says is about `graph`, the one with swaps. `olla.check` accepts the plan with the graph it was
    made from too: then it also proves that both compute the same.

    Attributes:
        graph: the graph with swaps; see `olla.swap.swapped_graph`.
        source_digest: digest of the graph without.
        origin: int32[graph.num_ops], op of the graph without swaps; -1: a swap-out or a swap-in.
        swaps: what is swapped, and when.
        base_peak_bytes: the peak of the same order without swaps.
    """

    graph: Graph
    source_digest: str
    origin: NDArray[np.int32]
    swaps: Swaps
    base_peak_bytes: int


def with_swaps(
    graph: Graph, order: NDArray[np.int32], swaps: Swaps, options: Options, progress: Progress | None
) -> SwapPlan:
    """Return the plan that swaps, laid out and checked.

    Args:
        graph: the graph without swaps.
        order: int32[n], what the swaps were chosen for.
        swaps: of that order.
        options: of the layout.
        progress: as in `olla.plan`.

    Raises:
        PlanError: the swaps are not those of the order.
    """
    rewritten, origin = swapped_graph(graph, order, swaps)
    program = np.arange(rewritten.num_ops, dtype=np.int32)
    kept: dict[str, Any] = {"method": "program", "precedences": (), "updates_may_move": True}  # the order says it all
    plan = pipeline.run(rewritten, replace(options, **kept, order=program), progress)
    before = pipeline.run(graph, replace(options, **kept, order=order, layout=False, time_limit=0.0), None)
    swap_plan = SwapPlan(
        **vars(plan),
        graph=rewritten,
        source_digest=graph.digest,
        origin=origin,
        swaps=swaps,
        base_peak_bytes=before.peak_bytes,
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
        progress: as in `olla.plan`.

    Raises:
        BudgetError: the blocks do not suffice for the budget.
        ValueError: the score is unknown.
    """
    from olla.devices import profile_of

    if score not in (*SCORES, "best"):
        raise ValueError(f"score is {score!r}, expected 'best' or one of {', '.join(SCORES)}")
    graph = pipeline.graph_of(source)
    order = np.arange(graph.num_ops, dtype=np.int32) if options.order is None else options.order.astype(np.int32)
    seconds = (goal.device if goal else profile_of(device)).op_seconds(graph)
    method = AutoSwap(graph, order, seconds, Link.of(link))
    names = SCORES if score == "best" else (score,)
    limit = goal.budget_bytes if goal else None
    if limit is not None:
        found = [method.at_limit(name, limit) for name in names]
        fitting = [swaps for swaps in found if swaps.peak_bytes <= limit]
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


def swapping(
    graph: Graph,
    order: NDArray[np.int32],
    seconds: NDArray[np.float64],
    link: Link | float,
    options: Options,
    *,
    limit: int | None = None,
    max_slowdown: float = 0.0,
    host_bytes: int | None = None,
    progress: Progress | None = None,
) -> SwapPlan:
    """Choose swaps for an order, as `olla.swap.plan_swaps` does, and return the plan."""
    swaps = plan_swaps(
        graph,
        order,
        seconds,
        link,
        limit=limit,
        max_slowdown=max_slowdown,
        host_bytes=host_bytes,
        time_limit=_SWAP_SHARE * options.time_limit,
        seed=options.seed,
        progress=progress,
    )
    return with_swaps(graph, order, swaps, options, progress)
