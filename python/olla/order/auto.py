"""olla's own method: min-cut refinement and branch and bound, from the program order first, then from other starts too.

Where work is limited rather than time, the first two alone, from the program order and fast list schedules.
"""

from __future__ import annotations

from olla.order.method import Answer, Problem
from olla.order.search import OrderSearch

_QUICK_SECONDS = 2.0  # most graphs need no more from the program order alone, and then no warm start
_LEAST_SHARE = 0.1  # of the time limit, that this gets however late it is


def solve(problem: Problem) -> Answer:
    """Refine the program order, then, where a gap is left, warm starts too."""
    search = OrderSearch(problem)
    if problem.options.max_work is not None:
        with search.stage("order"):
            search.refine([problem.order, *search.schedules()], search.left())
        return search.answer()
    with search.stage("order"):
        least = _LEAST_SHARE * problem.options.time_limit
        search.refine([problem.order], max(least, min(_QUICK_SECONDS, 0.5 * search.left())))
    if search.peak == search.bound or search.left() <= 0.0:
        return search.answer()
    starts = [search.order]
    with search.stage("warmstart"):
        starts += search.warm_starts()
    with search.stage("order"):
        search.refine(starts, search.left())
    return search.answer()
