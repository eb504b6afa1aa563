"""A choice of swaps as a plan: the graph that swaps, laid out and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olla import _core, pipeline
from olla.base import Progress
from olla.check.check import check
from olla.graph import Graph
from olla.plan import BudgetPlan, Options, SwapPlan, Swaps
from olla.swap.graph import swapped_graph


def with_swaps(
    graph: Graph,
    order: NDArray[np.int32],
    swaps: Swaps,
    options: Options,
    progress: Progress | None,
    recomputation: BudgetPlan | None = None,
    goal: Mapping[str, Any] | None = None,
) -> SwapPlan:
    """Return the plan that swaps, laid out and checked.

    Args:
        graph: the training step.
        order: int32[n], what the swaps were chosen for: of that graph, or of the recomputation's.
        swaps: of that order.
        options: of the layout.
        progress: as in `olla.plan`.
        recomputation: the plan for whose graph the swaps were chosen.
        goal: what was asked for.

    Raises:
        PlanError: the swaps are not those of the order.
    """
    without = graph if recomputation is None else recomputation.graph
    rewritten, origin = swapped_graph(without, order, swaps)
    program = np.arange(rewritten.num_ops, dtype=np.int32)
    kept: dict[str, Any] = {"method": "program", "precedences": (), "updates_may_move": True}  # the order says it all
    plan = pipeline.run(rewritten, replace(options, **kept, order=program), progress)
    base_peak_bytes = _core.profile(without.core, order).peak_bytes
    method = options.method if recomputation is None else recomputation.method
    swap_plan = SwapPlan(
        **{**vars(plan), "method": method, "message": f"Of the graph that swaps: {plan.message}"},
        graph=rewritten,
        source_digest=graph.digest,
        origin=origin,
        swaps=swaps,
        recomputation=recomputation,
        goal=dict(goal or {}),
        base_peak_bytes=base_peak_bytes if recomputation is None else recomputation.base_peak_bytes,
    )
    check(graph, swap_plan)
    return swap_plan
