"""Is a plan what it says it is? The checker shares no code with the planners."""

from __future__ import annotations

from olla import _core
from olla.check.chunked import check_chunked
from olla.check.recomputed import check_equivalent
from olla.check.swapped import check_copies, check_swaps
from olla.errors import PlanError
from olla.graph import Graph, profile_of, rules
from olla.plan import BudgetPlan, Plan, SwapPlan


def check(graph: Graph, plan: Plan) -> None:
    """Raise PlanError unless the plan is valid for the graph and reports true figures.

    A plan made with a budget belongs to its rewritten graph, and to the original one: given the latter, both are proved
    to compute the same values first; with a loss in chunks, up to the inside of that loss (see `olla.check.chunked`).

    Args:
        graph: the training step the plan was made for.
        plan: a plan, from `olla.plan` or a file.

    Raises:
        PlanError: `rule` names what is broken, `ids` the ops or tensors concerned. Rule "digest": the plan belongs to
            another graph. Order: "permutation", "dependency", "mutation_order", "random_order", "extra_precedence".
            Layout: "offsets_length", "alignment", "negative_offset", "unplanned_offset", "missing_offset", "overlap",
            "arena". Rewriting: see `olla.check.recomputed`, `olla.check.chunked`; swaps: see `olla.check.swapped`.
            Figures: "resident_bytes", "peak", "program_peak", "bound", "load", "arena_bound".

    Complexity:
        O(m log m) for m = ops + tensors + uses.
    """
    if isinstance(plan, BudgetPlan | SwapPlan) and plan.source_digest == graph.digest:
        if isinstance(plan, BudgetPlan):
            _check_rewriting(graph, plan)
        else:
            if plan.recomputation is not None:
                _check_rewriting(graph, plan.recomputation)
                graph = plan.recomputation.graph
            check_swaps(graph, plan.graph, plan.origin)
            check_copies(graph, plan.graph, plan.origin, plan.swaps)
        graph = plan.graph
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan was made for graph {plan.graph_name!r} with {plan.num_ops} ops and {plan.num_tensors} tensors "
            f"(digest {plan.graph_digest[:12]}), this is graph {graph.name!r} with {graph.num_ops} ops and "
            f"{graph.num_tensors} tensors (digest {graph.digest[:12]}): plan this graph anew",
            rule="digest",
        )
    figures = {
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "program_peak_bytes": plan.program_peak_bytes,
        "resident_bytes": plan.resident_bytes,
        "arena_bytes": plan.arena_bytes,
        "load_bytes": plan.load_bytes,
    }
    _core.check(
        graph.core,
        plan.order,
        plan.offsets,
        plan.workspace_offsets,
        plan.alignment,
        figures,
        plan.before,
        plan.after,
    )
    if plan.arena_lower_bound_bytes > plan.arena_bytes:
        raise PlanError(
            f"arena_lower_bound_bytes is {plan.arena_lower_bound_bytes}, expected at most the arena of "
            f"{plan.arena_bytes} bytes: no arena is below the bound",
            rule="arena_bound",
        )


def _check_rewriting(graph: Graph, plan: BudgetPlan) -> None:
    if plan.chunked is not None:
        check_chunked(graph, plan.chunked)
        graph = plan.chunked.graph
    allowed = rules(graph, profile_of("a100"))  # what may be done does not depend on the device
    check_equivalent(graph, plan.graph, plan.origin, plan.rerun, plan.tensor_origin, allowed)
