"""The program order, or the one the caller gave, with the bound that says how far it is from the best."""

from __future__ import annotations

from olla.order.method import Answer, Problem
from olla.order.search import OrderSearch


def solve(problem: Problem) -> Answer:
    """Keep the order; raise the bound by minimum cuts."""
    search = OrderSearch(problem)
    with search.stage("order"):
        search.raise_bound(search.left())
    return search.answer()
