"""What the planner asks of a search that rewrites a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from olla.errors import BudgetError
from olla.plan.options import Options
from olla.plan.plan import Plan
from olla.plan.rewrite import Rewrite


class RewriteSearch(Protocol):
    """A search for rewritings of one graph. It orders where it has to, but lays out nothing and makes no plan."""

    base_peak_bytes: int
    base_seconds: float
    lowest_bytes: int

    @property
    def details(self) -> tuple[str, ...]:
        """Lines for a reader who wants to know more."""

    def least(self, added_seconds: float, /) -> Sequence[Rewrite]:
        """Find the least peak that adds at most so many seconds."""

    def within(self, peak_bytes: int, /) -> Sequence[Rewrite] | None:
        """Find the least added time for a peak; None where that is not reached."""

    def last_resort(self, budget_bytes: int, /) -> Sequence[Rewrite] | None:
        """Find the least peak at whatever time, where nothing was found within a budget and something may be."""

    def final_options(self) -> Options:
        """Return the options by which the graph that was found is ordered and laid out."""

    def bounds(self, plan: Plan, added_seconds: float, peak_bytes: int, /) -> tuple[int, float]:
        """Return the least peak of every plan within an added time, and the least added time within a peak."""

    def refused(self, budget_bytes: int, /) -> BudgetError:
        """Return the error for a budget that nothing was found for."""
