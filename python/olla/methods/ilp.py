"""OLLA's split: the order program on the whole graph, then the layout.

Source: Steiner et al., OLLA (arXiv 2210.12924), equations (14) and (15).
"""

from __future__ import annotations

from olla.methods import Answer, Problem
from olla.methods.search import Search

_BOUND_SHARE = 0.2  # of the time to search, before the integer program


def solve(problem: Problem) -> Answer:
    """Start from the best list schedule and a bound by minimum cuts, then solve the order program.

    Raises:
        SolverError: HiGHS is missing or failed.
    """
    search = Search(problem)
    starts = [problem.order]
    with search.stage("warmstart"):
        starts += search.warm_starts()
    with search.stage("order"):
        search.keep(min(starts, key=search.peak_of))
        search.raise_bound(_BOUND_SHARE * search.left())
    if not search.interrupted:
        with search.stage("ilp"):
            order, bound = search.solve_ilp(problem.core, search.order, search.bound, search.left())
            search.bound = max(search.bound, bound)
            search.keep(order)
    return search.answer()
