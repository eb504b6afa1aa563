"""Is a plan what it says it is? The checker shares no code with the planners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from olla import _core
from olla.errors import PlanError

if TYPE_CHECKING:
    from olla.graph import Graph
    from olla.plan import Plan


def check(graph: Graph, plan: Plan) -> None:
    """Raise PlanError unless the plan is valid for the graph and reports true figures.

    Args:
        graph: the training step the plan was made for.
        plan: a plan, from `olla.plan` or a file.

    Raises:
        PlanError: `rule` names what is broken, `ids` the ops or tensors concerned. Rule "digest": the plan belongs to
            another graph. Order: "permutation", "dependency", "mutation_order", "random_order", "extra_precedence".
            Layout: "offsets_length", "alignment", "negative_offset", "unplanned_offset", "missing_offset", "overlap",
            "arena". Figures: "resident_bytes", "peak", "program_peak", "bound", "load", "arena_bound".

    Complexity:
        O(m log m) for m = ops + tensors + uses.
    """
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
