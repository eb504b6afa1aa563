"""SmartPool: the order stays; what outlives the iteration is placed first, then by falling size, best fit.

Source: Zhang et al., Efficient memory management for GPU-based deep learning systems (arXiv 1903.06631), section 3.
"""

from __future__ import annotations

import numpy as np

from olla import _core
from olla.layout import ArenaBuffers, Placement
from olla.order import Answer, Problem
from olla.order.search import OrderSearch


def solve(problem: Problem) -> Answer:
    """Lay out the order as it is; raise its bound by minimum cuts."""
    search = OrderSearch(problem)
    placement: Placement | None = None
    if problem.options.layout:
        with search.stage("layout"):
            alignment = problem.options.alignment
            buffers = ArenaBuffers(problem.graph, problem.core, problem.order, alignment)
            outlives = np.zeros(len(buffers.size), dtype=np.uint8)
            outlives[: len(buffers.tensors)] = np.isin(buffers.tensors, problem.graph.outputs)
            found = _core.smartpool(
                buffers.lower, buffers.upper, buffers.size, outlives, alignment, search.left(), problem.progress
            )
            search.interrupted |= found.cancelled
            placement = buffers.placed(found.offsets)
    with search.stage("bound"):
        search.raise_bound(search.left())
    return search.answer(placement)
