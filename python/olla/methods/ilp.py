"""OLLA's split: the order program on the whole graph, then the address program.

Source: Steiner et al., OLLA (arXiv 2210.12924), equations (14) and (15).
"""

from __future__ import annotations

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
    starts = [search.order]
    with search.stage("warmstart"):
        starts += search.warm_starts()
    with search.stage("order"):
        search.keep(min(starts, key=search.peak_of))
        search.raise_bound(BOUND_SHARE * search.left())
    if not search.interrupted:
        with search.stage("ilp"):
            order, bound = search.solve_ilp(search.problem.core, search.order, search.bound, search.left())
            search.bound = max(search.bound, bound)
            search.keep(order)
            search.details.append(f"order program: peak {search.peak}, bound {search.bound}")
