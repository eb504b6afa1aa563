"""The layout of an order by heuristics and, where these leave a gap, by OLLA's address program."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from olla._core import IlpFigures
from olla.ilp import address_ilp
from olla.layout import ArenaBuffers, LayoutOptions, LayoutResult, Placement
from olla.layout import place as place_buffers
from olla.order.search import OrderSearch

_HEURISTIC_SHARE = 0.5  # of the time left
_MAX_BUFFERS = 20_000  # the address program compares every two of them

Int64Array = NDArray[np.int64]


def place(search: OrderSearch, order: NDArray[np.int32]) -> Placement | None:
    """Lay out an order: the portfolio of `olla.layout`, then the address program unless the load is met.

    Args:
        search: gives the problem and the time; it records seconds, details and interruption.
        order: int32[num_ops], the op that runs at step i.

    Returns:
        The placement; None where none was asked for, or Ctrl-C came before the first.

    Raises:
        SolverError: HiGHS is missing or failed, or its answer does not hold.
    """
    problem = search.problem
    if not problem.options.layout:
        return None
    buffers = ArenaBuffers(problem.graph, problem.core, order, problem.options.alignment)
    found: LayoutResult | None = None
    with search.stage("layout"):
        found = _heuristic(search, buffers, _HEURISTIC_SHARE * search.left(1.0))
    if found is None:
        return None
    if found.height_bytes <= found.bound_bytes or search.interrupted:
        return buffers.placed(found.offsets)
    return buffers.placed(solve_addresses(search, buffers, start=found.offsets, bound=found.bound_bytes))


def _heuristic(
    search: OrderSearch, buffers: ArenaBuffers, limit: float, fixed: Int64Array | None = None
) -> LayoutResult:
    """Return what the portfolio of `olla.layout` finds."""
    options = search.problem.options
    effort = LayoutOptions(alignment=options.alignment, seed=options.seed)
    progress = search.problem.progress
    found = place_buffers(buffers.lower, buffers.upper, buffers.size, effort, limit, progress, fixed=fixed)
    search.interrupted |= found.cancelled
    return found


def solve_addresses(
    search: OrderSearch,
    buffers: ArenaBuffers,
    *,
    start: Int64Array | None = None,
    fixed: Int64Array | None = None,
    bound: int = 0,
) -> Int64Array:
    """Run the address program on the buffers of an order.

    Args:
        search: gives the problem and the time; it records seconds, details and interruption.
        buffers: what to place.
        start: int64[m], bytes: a layout to start from, and the answer where Ctrl-C comes first; default: a first fit.
        fixed: int64[m], bytes: an offset that buffer i keeps, or -1.
        bound: a proven lower bound of the height, or 0.

    Returns:
        int64[m], bytes: where buffer i begins.
    """
    options = search.problem.options
    num = len(buffers.size)
    if num > _MAX_BUFFERS:
        search.details.append(f"address program: not built for {num} buffers, the limit is {_MAX_BUFFERS}")
        return _heuristic(search, buffers, search.left(1.0), fixed).offsets if start is None else start
    places = start
    with search.stage("address"):
        found = address_ilp(
            buffers.lower,
            buffers.upper,
            buffers.size,
            alignment=options.alignment,
            fixed=fixed,
            start=start,
            lower_bound_bytes=bound,
            time_limit=search.left(1.0),
            seed=options.seed,
            progress=search.problem.progress,
        )
        search.interrupted |= found.cancelled
        places = found.offsets
        search.details.append(
            f"address program: {found.status}, arena {found.height_bytes}, bound {found.lower_bound_bytes}, "
            f"load {found.load_bytes}; {described(found.figures)}"
        )
    return _heuristic(search, buffers, 0.0, fixed).offsets if places is None else places


def described(figures: IlpFigures) -> str:
    """Return the figures of an integer program as text."""
    size = f"{figures.num_columns} columns, {figures.num_rows} rows, {figures.num_nodes} nodes"
    return f"{size}; {figures.message}"
