"""What a search for rewritings starts from: the best order of the graph as it is, and the order to drop values on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.base import Progress, rivals
from olla.graph import Graph
from olla.order.base_orders import early_updates
from olla.pipeline import Ordered, find_order
from olla.plan import Options

# Work for the best order without rewriting, and for that of one other graph or start; see olla.recompute.search.
_BASE_WORK = 60_000_000
ORDER_WORK = 15_000_000
_BASE_SHARE = 0.2  # of the time limit


class Base(NamedTuple):
    """A graph before it is rewritten.

    Attributes:
        found: the best order, and its proof.
        first_order: int32[n], the base order that choices start from.
    """

    found: Ordered
    first_order: NDArray[np.int32]


def is_movable(options: Options) -> bool:
    """Whether any valid order will do as a base order."""
    return options.order is None and options.updates_may_move


def find_base(graph: Graph, options: Options, progress: Progress | None, left_out: list[str]) -> Base:
    """Return the best order, and the same with weight updates early where that costs no memory.

    Gradients then go at once.

    Args:
        graph: the training step.
        options: of `olla.plan`.
        progress: the same.
        left_out: takes a note on each heuristic that failed.
    """
    limit = _BASE_SHARE * options.time_limit
    # An integer program chooses what to drop; the order it starts from is the best there is in either case.
    method = "auto" if options.method == "ilp" else options.method
    quick = replace(options, method=method, layout=False, time_limit=limit, max_work=_BASE_WORK)
    found = find_order(graph, quick, progress, overlap=False)
    left_out += [line for line in found.answer.details if line.startswith(rivals.LEFT_OUT)]
    if not is_movable(options):
        return Base(found, found.order.copy())
    schedule = {"the best order with early updates": lambda: early_updates(graph, found.order)}
    early = list(rivals.orders(graph.core, schedule, left_out).values()) or [found.order]
    limits = _core.Limits(time_limit=limit, max_work=ORDER_WORK, progress=progress)
    better = _core.order(graph.core, early, options.seed, limits)
    return Base(found, better.order if better.peak_bytes <= found.peak_bytes else found.order.copy())
