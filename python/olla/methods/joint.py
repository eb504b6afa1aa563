"""OLLA's equation (9): order and addresses in one program, for the smallest arena.

Source: Steiner et al., OLLA (arXiv 2210.12924), equation (9).
"""

from __future__ import annotations

from olla._core import arena_graph, lower_bound, profile
from olla.ilp import joint_ilp
from olla.layout import Placement
from olla.methods.addresses import described, place
from olla.methods.ilp import solve_order
from olla.order import Answer, Problem
from olla.order.search import OrderSearch

_SPLIT_SHARE = 0.5  # of the time limit, for the split answer that the joint program starts from


def solve(problem: Problem) -> Answer:
    """Start from the split answer and a bound by minimum cuts; where they do not meet, solve the joint program.

    It is the arena that this method minimises: where no order of least peak has a layout as small, it takes another
    one. Without a layout, it is the split.

    Raises:
        SolverError: HiGHS is missing or failed, or its answer does not hold.
    """
    search = OrderSearch(problem._replace(left=lambda share: problem.left(_SPLIT_SHARE * share)))
    solve_order(search)
    placement = place(search, search.order)
    if placement is None:
        return search.answer()
    arena = arena_graph(problem.core, problem.options.alignment)
    search.problem = problem
    bound = 0
    with search.stage("joint"):
        limit = 0.5 * search.left(1.0)
        bound, cancelled = lower_bound(arena, search.order, arena.num_ops, limit, problem.progress)
        search.interrupted |= cancelled
    if search.interrupted or placement.arena_bytes == bound:
        return search.answer(placement)._replace(arena_lower_bound_bytes=bound)
    with search.stage("joint"):
        found = joint_ilp(
            arena,
            search.order,
            offsets=placement.offsets,
            workspace_offsets=placement.workspace_offsets,
            lower_bound_bytes=bound,
            time_limit=problem.left(1.0),
            seed=problem.options.seed,
            progress=problem.progress,
        )
        search.interrupted |= found.cancelled
        search.details.append(
            f"joint program: {found.status}, arena {found.arena_bytes}, bound {found.lower_bound_bytes}; "
            f"{described(found.figures)}"
        )
        bound = found.lower_bound_bytes
        if (saved := placement.arena_bytes - found.arena_bytes) > 0:
            search.order, search.note = found.order, f"The joint program's arena is {saved} bytes below the split's."
            load = profile(arena, found.order).peak_bytes
            placement = Placement(found.offsets, found.workspace_offsets, found.arena_bytes, load)
    return search.answer(placement)._replace(arena_lower_bound_bytes=bound)
