"""Choose the ops whose cuts bound the peak best; make the error for a budget that no plan was found for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from olla._core import profile
from olla.errors import BudgetError
from olla.graph import Graph
from olla.plan import Plan

_NUM_OPS = 12  # per source of ops whose cuts make a bound
# Ops that are tried for the largest cuts: in each of 70 captured graphs the largest of all ops is among them.
_NUM_HEAVIEST = 200


def busiest(graph: Graph, order: NDArray[np.int32], plan: Plan | None = None) -> NDArray[np.int32]:
    """Return the ops with most live memory under an order, and in a plan's rewritten graph without its swaps."""

    def first(graph: Graph, order: NDArray[np.int32]) -> NDArray[np.int32]:
        return order[np.argsort(-profile(graph.core, order).live_bytes, kind="stable")][:_NUM_OPS]

    ops = first(graph, order).tolist()
    if plan is not None and plan.recomputed is not None:
        own = plan.order if plan.swapped is None else plan.swapped.origin[plan.swapped.origin >= 0]
        ops += plan.recomputed.origin[first(plan.recomputed.graph, own)].tolist()
    return np.array(list(dict.fromkeys(ops)), dtype=np.int32)


def heaviest(graph: Graph) -> NDArray[np.int32]:
    """Return the ops that read, write and work with most bytes at once, the first the most.

    Complexity: O(m) for m = ops + tensors + uses.
    """
    num_bytes = graph.workspace_bytes.astype(np.float64)
    for lists in (graph.reads, graph.writes):
        weights = graph.tensor_bytes[lists.item]
        num_bytes += np.bincount(lists.owner, weights=weights, minlength=graph.num_ops)
    return np.argsort(-num_bytes, kind="stable")[:_NUM_HEAVIEST].astype(np.int32)


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
