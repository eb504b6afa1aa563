"""Base orders: what a rewriting starts from. None is best everywhere, so the greedy tries several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla._core import Graph as CoreGraph
from olla._core import breadth_first_order, depth_first_order, least_peak_order
from olla.base import rivals

if TYPE_CHECKING:
    from olla.graph import Graph, Lists

_NEXT_TO_NOTHING = 64  # times fewer bytes than an op reads

Order = NDArray[np.int32]


def inductor_schedules(core: CoreGraph) -> dict[str, Callable[[], Order]]:
    """Return Inductor's list schedules by their names; see cpp/olla/order/list_schedules.hpp."""
    return {
        "least peak memory first": lambda: least_peak_order(core),
        "breadth first": lambda: breadth_first_order(core),
        "depth first": lambda: depth_first_order(core),
    }


def base_orders(graph: Graph, best: Order, notes: list[str] | None = None) -> list[Order]:
    """Return orders to rewrite from, the likeliest first: the best one, the program's, and list schedules.

    Weight updates and what makes next to nothing go early in some of them, so that gradients go at once.

    Args:
        graph: the training step.
        best: int32[num_ops], the order of least peak without rewriting.
        notes: a line is added for each that failed and is left out.

    Returns:
        Valid orders, int32[num_ops] each, no two the same.

    Complexity:
        O(ops log ops + dependencies + uses).
    """
    program = np.arange(graph.num_ops, dtype=np.int32)
    lists = inductor_schedules(graph.core)
    schedules: dict[str, Callable[[], Order]] = {
        "early updates": lambda: early_updates(graph, program),
        "the best order": lambda: best,
        "least peak memory first": lists["least peak memory first"],
        "breadth first": lists["breadth first"],
        "depth first with early updates": lambda: early_updates(graph, lists["depth first"]()),
    }
    orders = rivals.orders(graph.core, schedules, [] if notes is None else notes)
    return list({order.tobytes(): order for order in orders.values()}.values())


def induced(graph: Graph, order: Order, origin: NDArray[np.int32]) -> Order | None:
    """Return the order of a graph's ops that an order of its rewriting implies: by the first run of each.

    Args:
        graph: the original graph.
        order: int32[m], of the rewriting.
        origin: int32[m], op of the graph that op i of the rewriting stands for.

    Returns:
        int32[num_ops]; None where that order is not valid: what an op overwrites may be made again before.
    """
    runs = origin[order]
    first = np.unique(runs, return_index=True)[1]
    found = np.ascontiguousarray(runs[np.sort(first)], dtype=np.int32)
    return found if graph.core.is_order(found) else None


def freed_bytes(graph: Graph) -> NDArray[np.int64]:
    """Return int64[num_tensors]: bytes that go once all users of tensor t have run; 0 where it lasts."""
    freeable = graph.donated | (graph.writer >= 0)
    freeable[graph.outputs] = False
    return np.where(freeable, graph.tensor_bytes, 0)


def bytes_per_op(graph: Graph, lists: Lists) -> NDArray[np.int64]:
    """Return int64[num_ops]: bytes of the tensors in list i."""
    total = np.concatenate(([0], np.cumsum(graph.tensor_bytes[lists.item])))
    return np.diff(total[lists.offset])


def early_updates(graph: Graph, order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the order with every weight update, and every op that makes next to nothing, right behind what it needs.

    The norms of gradients that are to be clipped make next to nothing: behind them, a gradient may go and come back.

    Args:
        graph: the training step.
        order: int32[num_ops], valid; all other ops keep its order.

    Returns:
        int32[num_ops], item s is the op at step s.

    Complexity:
        O(ops log ops + dependencies).
    """
    offset, preds = graph.core.precedences()
    update = np.array([kind == "update" for kind in graph.op_kinds], dtype=np.bool_)
    made, used = (bytes_per_op(graph, lists) for lists in (graph.writes, graph.reads))
    update |= (_NEXT_TO_NOTHING * made < used) & ~graph.random
    step = np.argsort(order)
    key = step.copy()
    for v in order.tolist():
        before = preds[offset[v] : offset[v + 1]]
        latest = int(key[before].max()) if len(before) else 0
        key[v] = latest if update[v] else max(int(step[v]), latest)
    return np.lexsort((step, update, key)).astype(np.int32)
