"""OLLA's split: the order program on the whole graph, then the address program.

Source: Steiner et al., OLLA (arXiv 2210.12924), equations (14) and (15).
"""

from __future__ import annotations

from olla.ilp import order_ilp
from olla.methods.addresses import place
from olla.order import Answer, Problem
from olla.order.search import OrderSearch

BOUND_SHARE = 0.2  # of the time to search, before the integer program


def solve(problem: Problem) -> Answer:
    """Start from the best list schedule and a bound by minimum cuts, solve the order program, then the address program.

    Raises:
        SolverError: HiGHS is missing or failed, or its answer does not hold.
    """
    search = OrderSearch(problem)
    solve_order(search)
    placement = place(search, search.order)
    return search.answer(placement)


def solve_order(search: OrderSearch) -> None:
    """Find the order: the first half of the split."""
    problem, starts = search.problem, [search.order]
    with search.stage("warmstart"):
        starts += search.warm_starts()
    with search.stage("order"):
        search.keep(min(starts, key=search.peak_of))
        search.raise_bound(BOUND_SHARE * search.left())
    if not search.interrupted:
        with search.stage("ilp"):
            found = order_ilp(
                problem.core,
                search.order,
                lower_bound_bytes=search.bound,
                time_limit=search.left(),
                seed=problem.options.seed,
                progress=problem.progress,
            )
            search.interrupted |= found.cancelled
            search.bound = max(search.bound, found.lower_bound_bytes)
            search.keep(found.order)
            search.details.append(f"order program: peak {search.peak}, bound {search.bound}")
