"""PyTorch Inductor's choice: the best of the present order and three list schedules.

Source: torch/_inductor/memory.py, torch 2.13; the rules are its own, the implementation is ours
(cpp/olla/order/list_schedules).
"""

from __future__ import annotations

from olla.errors import SolverError
from olla.order.base_orders import inductor_schedules
from olla.order.method import Answer, Problem
from olla.order.search import OrderSearch


def solve(problem: Problem) -> Answer:
    """Take the order of least peak, the present one among equals; raise its bound by minimum cuts."""
    search = OrderSearch(problem)
    peaks = {"present order": search.peak}
    with search.stage("order"):
        orders = search.orders(inductor_schedules(problem.core))
        if not orders:
            raise SolverError(f"none of Inductor's schedules gave an order: {'; '.join(search.details)}")
        for name, order in orders.items():
            peaks[name] = search.peak_of(order)
            search.keep(order)
    with search.stage("bound"):
        search.raise_bound(search.left())
    search.details += [f"{name}: peak {peak} bytes" for name, peak in peaks.items()]
    return search.answer()
