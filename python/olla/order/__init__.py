"""When everything runs: what is asked of a method and what it answers, and our own orders."""

from olla.order.method import Answer, Problem

__all__ = [
    "Answer",
    "Problem",
]
