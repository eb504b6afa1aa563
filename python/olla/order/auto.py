"""Ours: min-cut refinement and branch and bound, then the order program where a gap is left.

Where work is limited rather than time, the first two alone, from the program order and fast list schedules.
"""

from __future__ import annotations

import numpy as np

from olla._core import profile
from olla.base import rivals
from olla.order.base_orders import inductor_schedules
from olla.order.method import Answer, Problem
from olla.order.search import Order, Search
from olla.order.window import window_graph

_ILP_MAX_OPS = 400  # larger graphs see the order program on windows only
_WINDOW_OPS = 120  # steps around the peak that the order program orders anew
_QUICK_SECONDS = 2.0  # most graphs need no more from the program order alone, and then no warm start, nor numba
_ILP_SHARE = 0.4  # of the time to search, where the order program may follow
_WINDOW_SHARE = 0.1  # the same, where it may follow on windows


def solve(problem: Problem) -> Answer:
    """Refine the program order, then list schedules too; close what gap is left by the order program."""
    search = Search(problem)
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
        search.refine(starts, search.left() * (1.0 - (_ILP_SHARE if is_small else _WINDOW_SHARE)))
    if not search.interrupted and not search.is_proved:
        with search.stage("ilp"):
            try:
                _solve_whole(search) if is_small else _solve_windows(search)
            except Exception as error:
                rivals.leave_out("the integer program", rivals.failure(error, problem.progress), search.details)
                search.note = f"The integer program did not run: {error}"
    return search.answer()


def _schedules(search: Search) -> list[Order]:
    return list(search.orders(inductor_schedules(search.problem.core)).values())


def _solve_whole(search: Search) -> None:
    order, bound = search.solve_ilp(search.problem.core, search.order, search.bound, search.left())
    search.bound = max(search.bound, bound)
    search.keep(order)


def _solve_windows(search: Search) -> None:
    """Solve the order program on the steps around the peak, as long as that lowers it."""
    graph, core = search.problem.graph, search.problem.core
    before = search.peak + 1
    while search.bound < search.peak < before and search.left() > 0.0:
        before = search.peak
        peak_step = profile(core, search.order).peak_step
        lo = max(0, peak_step - _WINDOW_OPS // 2)
        hi = min(graph.num_ops, lo + _WINDOW_OPS)
        inside = window_graph(graph, core, search.order, lo, hi)
        steps, _ = search.solve_ilp(inside, np.arange(hi - lo, dtype=np.int32), 0, search.left())
        order = search.order.copy()
        order[lo:hi] = search.order[lo:hi][steps]
        search.keep(order)
