"""Blocks of memory of a planned step: which tensor, from when to when, at which offset."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.errors import PlanError
from olla.graph import Graph
from olla.plan import Plan


class Block(NamedTuple):
    """A tensor, or the workspace of an op.

    Attributes:
        label: what it is, for people.
        kind: of the tensor, as in `Graph.tensor_kinds`, or "workspace".
        op: that makes it; -1 where it is there before the step.
        size: bytes.
        first, last: step at which it begins to live, and the one after its last; between two whole numbers where it
            begins or ends in the middle of an op.
        offset: in bytes. What is there before the step lies behind the arena, side by side; so does everything where
            the plan has no layout.
    """

    label: str
    kind: str
    op: int
    size: int
    first: float
    last: float
    offset: int


def planned_graph(graph: Graph, plan: Plan) -> Graph:
    """Return the graph that a plan orders: the given one, or what it was rewritten to.

    Raises:
        PlanError: rule "digest"; the plan belongs to another graph.
    """
    last = plan.graph if plan.graph is not None and plan.source_digest == graph.digest else graph
    if last.digest != plan.graph_digest:
        raise PlanError(
            f"the plan was made for graph {plan.graph_name!r} (digest {plan.graph_digest[:12]}), this is graph "
            f"{graph.name!r} (digest {graph.digest[:12]}): give the graph that was planned",
            rule="digest",
        )
    return last


def blocks_of(graph: Graph, order: NDArray[np.int32], plan: Plan | None = None) -> list[Block]:
    """Return the blocks of a graph under an order, resident ones first. What has no bytes is left out.

    Args:
        graph: the graph.
        order: int32[num_ops], the op that runs at step i.
        plan: where blocks lie: the plan of this graph and order. None: side by side.

    Complexity:
        O(m log m) for m = ops + tensors + uses.
    """
    lives = _core.profile(graph.core, order)
    found: list[Block] = []
    offsets = np.full(graph.num_tensors, -1) if plan is None else plan.offsets
    workspace_offsets = np.full(graph.num_ops, -1) if plan is None else plan.workspace_offsets
    end = 0 if plan is None else plan.arena_bytes
    for t in np.lexsort((lives.first, graph.writer >= 0)).tolist():
        size, op, offset = int(graph.tensor_bytes[t]), int(graph.writer[t]), int(offsets[t])
        if not size or (graph.donated[t] and not lives.last[t]):  # nothing reads it: it is there for no step
            continue
        if offset < 0:
            offset, end = end, end + size
        life = int(lives.first[t]), int(lives.last[t])
        found.append(Block(tensor_label(graph, t, op), graph.tensor_kinds[t], op, size, *life, offset))
    for step, op in enumerate(order.tolist()):
        if size := int(graph.workspace_bytes[op]):
            offset = int(workspace_offsets[op])
            if offset < 0:
                offset, end = end, end + size
            found.append(Block(workspace_label(graph, op), "workspace", op, size, step, step + 1, offset))
    return found


def tensor_label(graph: Graph, tensor: int, op: int) -> str:
    """Return a tensor's name, or else that of the op that makes it, or else its number."""
    if op < 0:
        return graph.tensor_names[tensor] or f"tensor {tensor}"
    return graph.tensor_names[tensor] or graph.op_names[op] or op_label(graph, op)


def workspace_label(graph: Graph, op: int) -> str:
    """Return what a workspace is called."""
    return f"workspace of {graph.op_names[op] or op_label(graph, op)}"


def op_label(graph: Graph, op: int) -> str:
    """Return an op's name and the operator it calls, or its number."""
    return " ".join(filter(None, (graph.op_names[op], graph.targets[op]))) or f"op {op}"
