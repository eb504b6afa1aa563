"""Base orders: what a rewriting starts from. None is best everywhere, so the greedy tries several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla._core import CoreGraph, breadth_first_order, depth_first_order, least_peak_order
from olla.base import rivals
from olla.graph import Lists

if TYPE_CHECKING:
    from olla.graph import Graph

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

    Weight updates and ops with tiny results run early in some of them, so that gradients are freed at once.

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
        "the program's order": lambda: program,
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

    Norms for gradient clipping make next to nothing: once they have run, a gradient may be evicted and restored.

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
    key, moves, before = step.tolist(), update.tolist(), Lists(offset, preds).to_lists()
    for v in order.tolist():
        latest = max([key[u] for u in before[v]], default=0)
        key[v] = latest if moves[v] else max(key[v], latest)
    return np.lexsort((step, update, key)).astype(np.int32)


def late_changes(graph: Graph, order: Order) -> Order:
    """Return the order with mutations of resident tensors right before the first op that waits for them, where free.

    Readers of a parameter can be recomputed only until it is mutated. AdamW's weight decay needs no gradient, and could
    run right behind the forward pass: that gains nothing, and rules out all recomputation.

    Args:
        graph: the training step.
        order: int32[num_ops], valid; all other ops keep its order.

    Returns:
        int32[num_ops], valid.

    Complexity:
        O(ops log ops + dependencies + uses).

    Example:
        >>> from olla import Graph
        >>> b = Graph.builder("decay")
        >>> bias, x, gradient = b.tensor(8, kind="parameter"), b.tensor(64), b.tensor(8)
        >>> _ = b.op("forward", reads=[bias], writes=[x]), b.op("decay", mutates=[bias])
        >>> _ = b.op("backward", reads=[x], writes=[gradient]), b.op("update", reads=[gradient], mutates=[bias])
        >>> late_changes(b.build(), np.arange(4, dtype=np.int32)).tolist()
        [0, 2, 1, 3]
    """
    step = np.argsort(order)
    waits = _idle_changes(graph, step)
    if not waits.any():
        return order
    last = np.full(graph.num_tensors, -1)  # step of the last use of what goes
    for lists in (graph.reads, graph.mutates):
        np.maximum.at(last, lists.item, step[lists.owner])
    freed = freed_bytes(graph)
    offset, preds = graph.core.precedences()
    users = np.repeat(np.arange(graph.num_ops), np.diff(offset))
    succs: dict[int, list[int]] = {}
    for u, v in zip(preds[waits[preds]].tolist(), users[waits[preds]].tolist(), strict=True):
        succs.setdefault(u, []).append(v)
    place = step.astype(np.float64)  # half a step before the op that waits
    for v in order[waits[order]][::-1].tolist():
        until = min((np.ceil(place[w]) for w in succs.get(v, ())), default=float(graph.num_ops))
        read, changed = graph.reads.of(v), graph.mutates.of(v)
        held = read[last[read] < until]
        if _NEXT_TO_NOTHING * freed[held].sum() <= graph.tensor_bytes[changed].sum():
            place[v] = until - 0.5
    return np.lexsort((step, place)).astype(np.int32)


def _idle_changes(graph: Graph, step: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool[num_ops]: whether op v only mutates resident tensors, of which some were read before."""
    lasts = (graph.writer < 0) & ~graph.donated
    first_read = np.full(graph.num_tensors, graph.num_ops)
    np.minimum.at(first_read, graph.reads.item, step[graph.reads.owner])
    owner, changed = graph.mutates.owner, graph.mutates.item
    idle = np.zeros(graph.num_ops, dtype=np.bool_)
    idle[owner[first_read[changed] < step[owner]]] = True
    idle[owner[~lasts[changed]]] = False
    idle &= (bytes_per_op(graph, graph.writes) == 0) & ~graph.random & ~graph.communicates
    return idle
