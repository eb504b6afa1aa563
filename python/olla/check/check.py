"""Is a plan what it says it is? The checker shares no code with the planners."""

from __future__ import annotations

from olla import _core
from olla.check.chunked import check_chunked
from olla.check.collectives import check_collectives, check_kept
from olla.check.recomputed import check_equivalent
from olla.check.swapped import check_copies, check_swaps
from olla.errors import PlanError
from olla.graph import Graph, profile_of, rules
from olla.plan import Chunked, Plan, Recomputed, Rewrite, Swapped

_FIGURES = ("peak", "lower_bound", "program_peak", "resident", "donated", "arena", "load")


def check(graph: Graph, plan: Plan) -> None:
    """Raise PlanError unless the plan is valid for the graph and reports true figures.

    A plan with rewritings belongs to its last graph, and to the one that was given: for the latter every rewriting is
    first proved to compute the same values; with a loss in chunks, up to the inside of that loss (see
    `olla.check.chunked`). What the plan says of the program order of the graph that was given is checked with that
    graph only.

    Args:
        graph: the training step the plan was made for.
        plan: a plan, from `olla.plan` or a file.

    Raises:
        PlanError: `rule` names what is broken, `ids` the ops or tensors concerned, of the rewritten graph where there
            is one. Rule "digest": the plan belongs to another graph. Order: "permutation", "dependency",
            "mutation_order", "random_order", "extra_precedence", "collective_order".
            Layout: "offsets_length", "alignment", "negative_offset", "unplanned_offset", "missing_offset", "overlap",
            "arena". Rewriting: see `olla.check.recomputed`, `olla.check.chunked`; swaps: see `olla.check.swapped`.
            Figures: "resident_bytes", "donated_bytes", "peak", "program_peak", "bound", "load", "arena_bound".

    Complexity:
        O(m log m) for m = ops + tensors + uses.
    """
    given = None if plan.rewrites else graph  # whose program order is what the plan is compared with
    if plan.source_digest == graph.digest:
        given = graph
        for rewrite in plan.rewrites:
            _check_rewrite(graph, rewrite)
            check_kept(graph, rewrite.graph, rewrite.origin)
            graph = rewrite.graph
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan was made for graph {plan.graph_name!r} with {plan.num_ops} ops and {plan.num_tensors} tensors "
            f"(digest {plan.graph_digest[:12]}), this is graph {graph.name!r} with {graph.num_ops} ops and "
            f"{graph.num_tensors} tensors (digest {graph.digest[:12]}): plan this graph anew",
            rule="digest",
        )
    offsets = (plan.offsets, plan.workspace_offsets, plan.alignment)
    figures = {f"{name}_bytes": getattr(plan, f"{name}_bytes") for name in _FIGURES}
    try:
        _core.check(graph.core, plan.order, *offsets, figures, plan.before, plan.after, given.core if given else None)
        check_collectives(graph, plan.order)
    except PlanError as error:
        if not plan.rewrites or error.rule == "program_peak":  # of the graph that was given
            raise
        raise PlanError(f"in the rewritten graph, {error}", rule=error.rule, ids=error.ids) from None
    if plan.arena_lower_bound_bytes > plan.arena_bytes:
        raise PlanError(
            f"arena_lower_bound_bytes is {plan.arena_lower_bound_bytes}, expected at most the arena of "
            f"{plan.arena_bytes} bytes: no arena is below the bound",
            rule="arena_bound",
        )


def _check_rewrite(graph: Graph, rewrite: Rewrite) -> None:
    if isinstance(rewrite, Chunked):
        check_chunked(graph, rewrite)
    elif isinstance(rewrite, Recomputed):
        allowed = rules(graph, profile_of("a100"))  # what may be done does not depend on the device
        check_equivalent(graph, rewrite.graph, rewrite.origin, rewrite.rerun, rewrite.tensor_origin, allowed)
    elif isinstance(rewrite, Swapped):
        check_swaps(graph, rewrite.graph, rewrite.origin)
        check_copies(graph, rewrite.graph, rewrite.origin, rewrite.swaps)
    else:
        raise PlanError(f"a rewriting is a {type(rewrite).__name__}, which no check is known for", rule="rewrite")
