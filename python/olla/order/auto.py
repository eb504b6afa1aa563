"""Ours: min-cut refinement and branch and bound, then the order program where a gap is left on a small graph.

Where work is limited rather than time, the first two alone, from the program order and fast list schedules.
"""

from __future__ import annotations

from olla.base import rivals
from olla.order.base_orders import inductor_schedules
from olla.order.method import Answer, Problem
from olla.order.search import Order, OrderSearch

_ILP_MAX_OPS = 400  # larger ones have not needed it: bench/results/recompute/search_ablation.md
_QUICK_SECONDS = 2.0  # most graphs need no more from the program order alone, and then no warm start, nor numba
_ILP_SHARE = 0.4  # of the time to search, where the order program may follow


def solve(problem: Problem) -> Answer:
    """Refine the program order, then list schedules too; close what gap is left by the order program."""
    search = OrderSearch(problem)
    if problem.options.max_work is not None:
        with search.stage("order"):
            search.refine([problem.order, *_schedules(search)], search.left())
        return search.answer()
    with search.stage("order"):
        search.refine([problem.order], min(_QUICK_SECONDS, 0.5 * search.left()))
    if search.is_proved or search.interrupted:
        return search.answer()
    starts = [search.order]
    with search.stage("warmstart"):
        starts += search.warm_starts()
        for schedule in _schedules(search):
            search.keep(schedule)  # never worse than the method inductor
        if search.order is not starts[0]:
            starts.append(search.order)
    is_small = problem.graph.num_ops <= _ILP_MAX_OPS
    with search.stage("order"):
        search.refine(starts, search.left() * (1.0 - _ILP_SHARE if is_small else 1.0))
    if is_small and not search.interrupted and not search.is_proved:
        with search.stage("ilp"):
            try:
                _solve_whole(search)
            except Exception as error:
                rivals.leave_out("the integer program", rivals.failure(error, problem.progress), search.details)
                search.note = f"The integer program did not run: {error}"
    return search.answer()


def _schedules(search: OrderSearch) -> list[Order]:
    return list(search.orders(inductor_schedules(search.problem.core)).values())


def _solve_whole(search: OrderSearch) -> None:
    order, bound = search.solve_ilp(search.problem.core, search.order, search.bound, search.left())
    search.bound = max(search.bound, bound)
    search.keep(order)
