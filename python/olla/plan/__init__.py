"""Requests and answers as data: options, goals, plans of every kind, their files and tables. No search."""

from olla.plan.chunks import Chunked
from olla.plan.goal import Goal, Swapping
from olla.plan.options import METHODS, Options, Source, graph_of
from olla.plan.plan import Plan, Status
from olla.plan.recomputed import BudgetPlan
from olla.plan.swapped import SwapPlan
from olla.plan.swaps import Link, Swaps

__all__ = [
    "METHODS",
    "BudgetPlan",
    "Chunked",
    "Goal",
    "Link",
    "Options",
    "Plan",
    "Source",
    "Status",
    "SwapPlan",
    "Swapping",
    "Swaps",
    "graph_of",
]
