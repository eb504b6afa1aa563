"""Precedences beyond those of the graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from olla.errors import PlanError
from olla.graph.columns import Lists, lists_of

if TYPE_CHECKING:
    from olla._core import CoreGraph
    from olla.graph.graph import Graph

Ids = NDArray[np.int32]


def updates_stay(graph: Graph) -> tuple[Ids, Ids]:
    """Return the precedences that keep weight updates where the program has them.

    Updates keep their program order among themselves; every op that stands before the first of them stays before it.

    Args:
        graph: the training step; its updates are the ops of kind "update".

    Returns:
        `(before, after)`, op ids int32: op before[i] must run before op after[i]. At most as many as there are ops:
        only ops that no other op before the first update follows need a precedence of their own.

    Complexity:
        O(ops + dependencies).
    """
    updates = np.flatnonzero([kind == "update" for kind in graph.op_kinds]).astype(np.int32)
    if len(updates) == 0:
        return updates, updates
    first = int(updates[0])
    offset, preds = graph.core.precedences()
    is_sink = np.ones(first, dtype=np.bool_)
    is_sink[preds[: offset[first]]] = False  # dependencies of the ops before the first update
    sinks = np.flatnonzero(is_sink).astype(np.int32)
    before = np.concatenate([updates[:-1], sinks])
    after = np.concatenate([updates[1:], np.full(len(sinks), first, dtype=np.int32)])
    return before, after


def with_precedences(graph: Graph, pairs: Iterable[tuple[int, int]]) -> Graph:
    """Return the graph with extra precedences as `after` of its ops.

    Args:
        graph: the training step.
        pairs: op ids (before, after).

    Raises:
        ValueError: a pair names no two ops, or is against the program order.

    Complexity:
        O(graph + pairs).
    """
    after = [dict.fromkeys(graph.after.of(v).tolist()) for v in range(graph.num_ops)]  # sets that keep their order
    for u, v in pairs:
        if not 0 <= u < v < graph.num_ops:
            raise ValueError(
                f"precedence ({u}, {v}): where a graph is rewritten, the first op must be one before the second in the "
                f"program order of the {graph.num_ops} ops"
            )
        after[v][u] = None
    return replace(graph, after=lists_of(after))


def require_order(core: CoreGraph, order: Ids) -> None:
    """Raise PlanError with the first broken dependency unless the order is valid.

    Args:
        core: the graph, extra precedences included.
        order: int32 op ids.

    Raises:
        PlanError: rule "permutation" or "dependency", with the ops concerned in `ids`.
    """
    if core.is_order(order):
        return
    if len(order) != core.num_ops or not np.array_equal(np.sort(order), np.arange(core.num_ops)):
        raise PlanError(
            f"the given order of {len(order)} ops is no permutation of the graph's ops 0 to {core.num_ops - 1}: "
            "name each op once",
            rule="permutation",
        )
    step = np.argsort(order)
    preds = Lists(*core.precedences())
    broken = int(np.argmax(step[preds.item] > step[preds.owner]))
    before, after = int(preds.item[broken]), int(preds.owner[broken])
    raise PlanError(
        f"the given order runs op {after} at step {step[after]}, but needs op {before} before it, "
        f"which runs at step {step[before]}",
        rule="dependency",
        ids=(before, after),
    )
