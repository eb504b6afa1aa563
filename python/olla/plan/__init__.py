"""Requests and answers as data: options, goals, a plan with its rewritings, its file and its table. No search."""

from olla.plan.chunks import Chunked
from olla.plan.goal import Goal, Swapping, asked
from olla.plan.options import METHODS, Options, Source, graph_of
from olla.plan.plan import Plan, Status
from olla.plan.recomputed import Recomputed
from olla.plan.request import Costs, Request
from olla.plan.rewrite import Rewrite, composed
from olla.plan.swapped import Swapped
from olla.plan.swaps import Link, Swaps

__all__ = [
    "METHODS",
    "Chunked",
    "Costs",
    "Goal",
    "Link",
    "Options",
    "Plan",
    "Recomputed",
    "Request",
    "Rewrite",
    "Source",
    "Status",
    "Swapped",
    "Swapping",
    "Swaps",
    "asked",
    "composed",
    "graph_of",
]
