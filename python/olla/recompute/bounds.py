"""What no rewriting of a graph can go below, by minimum cuts; the error for a budget that is below that."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from olla._core import RecomputeSearch, profile
from olla.errors import BudgetError
from olla.graph import Graph
from olla.plan import Plan

_NUM_OPS = 12  # per source of ops whose cuts make a bound


class CutBounds:
    """Lower bounds for every order and rewriting of a graph, by the cuts around some of its ops.

    Args:
        graph: the training step.
        order: int32[n], whose busiest ops are taken.
        search: of the core, for the graph.
        seconds: time limit of one bound.
        plan: of a rewriting, whose busiest ops are taken as well.

    Attributes:
        ops: int32[k], those with most live memory, whose cuts bound best.
    """

    def __init__(
        self, graph: Graph, order: NDArray[np.int32], search: RecomputeSearch, seconds: float, plan: Plan | None
    ) -> None:
        self.graph, self._search, self._seconds = graph, search, seconds
        self.ops = busiest(graph, order, plan)

    def least_peak(self, added_seconds: float) -> int:
        """Return bytes: no rewriting that adds at most these seconds has a lower peak."""
        peaks, _ = self._search.least_peak(self.ops, added_seconds, self._seconds, None)
        return max(int(peaks.max(initial=0)), self.graph.resident_bytes)

    def least_added_seconds(self, peak_bytes: int) -> float:
        """Return seconds: no rewriting with at most this peak adds less."""
        seconds, _ = self._search.least_added_seconds(self.ops, peak_bytes, self._seconds, None)
        return float(seconds.max(initial=0.0))

    def forcing(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the three ops that force the highest peak whatever time is added, and those peaks in bytes."""
        peaks, _ = self._search.least_peak(self.ops, math.inf, self._seconds, None)
        highest = np.argsort(-peaks, kind="stable")[:3]
        return self.ops[highest], peaks[highest]


def busiest(graph: Graph, order: NDArray[np.int32], plan: Plan | None) -> NDArray[np.int32]:
    """Return the ops with most live memory under an order, and in a plan of a rewriting without its swaps."""

    def first(graph: Graph, order: NDArray[np.int32]) -> NDArray[np.int32]:
        return order[np.argsort(-profile(graph.core, order).live_bytes, kind="stable")][:_NUM_OPS]

    ops = first(graph, order).tolist()
    if plan is not None and plan.recomputed is not None:
        own = plan.order if plan.swapped is None else plan.swapped.origin[plan.swapped.origin >= 0]
        ops += plan.recomputed.origin[first(plan.recomputed.graph, own)].tolist()
    return np.array(list(dict.fromkeys(ops)), dtype=np.int32)


def refusal(
    graph: Graph, budget_bytes: int, lowest_bytes: int, ops: NDArray[np.int32], needs: NDArray[np.int64], lever: str
) -> BudgetError:
    """Return the error for a budget that nothing was found for.

    Args:
        lowest_bytes: the lowest peak that was found.
        ops: int32[k], which need most, the first most of all.
        needs: int64[k], bytes that every plan needs while op i runs.
        lever: what else may help.
    """
    bound = max(int(needs.max(initial=0)), graph.resident_bytes)
    if bound > budget_bytes:
        names = ", ".join(f"op {v} ({graph.op_names[v]})" for v in ops[needs > budget_bytes])
        reason = f"no plan fits it: every one needs at least {bound} bytes"
        reason += f", {graph.resident_bytes} of them for resident tensors" if graph.resident_bytes else ""
        reason += f"; {names} forces this" if names else ""
        remedy = "a smaller batch, fewer resident bytes, or another device"
    else:
        reason = f"no plan was found that fits it; none needs less than {bound} bytes"
        remedy = f"{lowest_bytes} bytes, a longer time limit, or {lever}"
    message = f"the budget is {budget_bytes} bytes, and {reason}. The lowest found is {lowest_bytes}: try {remedy}"
    return BudgetError(message, rule="budget", ids=tuple(map(int, ops)))
