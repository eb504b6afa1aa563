"""PyTorch Inductor's choice: the best of the present order and three list schedules.

Source: torch/_inductor/memory.py, torch 2.13; the rules are its own, the implementation is ours (cpp/olla/inductor).
"""

from __future__ import annotations

from olla import _core
from olla.methods import Answer, Problem
from olla.methods.search import Search


def solve(problem: Problem) -> Answer:
    """Take the order of least peak, the present one among equals; raise its bound by minimum cuts."""
    search = Search(problem)
    peaks = {"present order": search.peak}
    with search.stage("order"):
        for name, schedule in (
            ("least peak memory first", _core.least_peak_order),
            ("breadth first", _core.breadth_first_order),
            ("depth first", _core.depth_first_order),
        ):
            order = schedule(problem.core)
            peaks[name] = search.peak_of(order)
            search.keep(order)
    with search.stage("bound"):
        search.raise_bound(search.left())
    details = tuple(f"{name}: peak {peak} bytes" for name, peak in peaks.items())
    return search.answer()._replace(details=details)
