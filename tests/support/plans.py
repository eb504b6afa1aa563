"""Graphs to plan, and plans made without the planners: any order, lowest free offsets, figures from the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from olla import Graph
from olla.plan import Plan, Status
from tests.support import oracle


def training_step() -> Graph:
    """Two layers, their gradients, their updates; the updates stand last."""
    builder = Graph.builder("two layers")
    weights = [builder.tensor(400, kind="parameter", name=f"weight[{i}]") for i in range(2)]
    batch = builder.tensor(64, kind="input", donated=True)
    hidden, loss, gradient = builder.tensor(200, name="hidden"), builder.tensor(4), builder.tensor(200)
    gradients = [builder.tensor(400) for _ in range(2)]
    builder.op("forward_0", reads=[weights[0], batch], writes=[hidden], kind="forward", workspace_bytes=128)
    builder.op("forward_1", reads=[weights[1], hidden], writes=[loss], kind="forward")
    builder.op("backward_1", reads=[weights[1], hidden], writes=[gradient, gradients[1]], kind="backward")
    builder.op("backward_0", reads=[batch, gradient], writes=[gradients[0]], kind="backward")
    for i in range(2):
        builder.op(f"update_{i}", reads=[gradients[i]], mutates=[weights[i]], kind="update")
    builder.output(loss)
    return builder.build()


def hard_graph(num_ops: int = 120, seed: int = 1) -> Graph:
    """A graph whose gap stays open, by default for minutes: ops read what any op before them wrote."""
    random = np.random.default_rng(seed)
    builder = Graph.builder("hard")
    tensors: list[int] = []
    for v in range(num_ops):
        reads = random.choice(tensors, size=min(2, len(tensors)), replace=False).tolist() if v >= num_ops // 6 else []
        tensors.append(builder.tensor(int(random.integers(1, 1000))))
        builder.op(f"op_{v}", reads=reads, writes=[tensors[-1]])
    return builder.build()


def plan_of(graph: Graph, order: Sequence[int], *, alignment: int = 8, layout: bool = True, **fields: Any) -> Plan:
    """Return a valid plan with the given order; fields replace those of the plan."""
    resident = sum(
        int(size) for t, size in enumerate(graph.tensor_bytes) if t not in graph.writes.item and not graph.donated[t]
    )
    plan = Plan(
        graph_name=graph.name,
        graph_digest=graph.digest,
        num_ops=graph.num_ops,
        num_tensors=graph.num_tensors,
        method="given",
        status=Status.FEASIBLE,
        message=Status.FEASIBLE.message,
        order=np.array(order, dtype=np.int32),
        offsets=np.full(graph.num_tensors, -1, dtype=np.int64),
        workspace_offsets=np.full(graph.num_ops, -1, dtype=np.int64),
        alignment=alignment,
        peak_bytes=oracle.peak(graph, order),
        lower_bound_bytes=resident,
        program_peak_bytes=oracle.peak(graph, range(graph.num_ops)),
        resident_bytes=resident,
        donated_bytes=int(graph.tensor_bytes[graph.donated].sum()),
        arena_bytes=0,
        load_bytes=0,
        before=np.zeros(0, dtype=np.int32),
        after=np.zeros(0, dtype=np.int32),
        seconds={},
        peak_op=None,
        peak_tensors=(),
        options={},
        source_digest=graph.digest,
        goal={},
        base_peak_bytes=oracle.peak(graph, order),
        peak_lower_bound_bytes=resident,
    )
    return replace(with_layout(graph, plan) if layout else plan, **fields)


def buffers_of(graph: Graph, plan: Plan) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Return what must be in the arena: ("tensor" or "workspace", id) -> (first step, last step + 1, rounded bytes)."""
    live = oracle.live_sets(graph, plan.order.tolist())
    buffers = {}
    for t in sorted(set(graph.writes.item.tolist())):
        steps = [step for step, tensors in enumerate(live) if t in tensors]
        buffers["tensor", t] = (steps[0], steps[-1] + 1, _rounded(graph.tensor_bytes[t], plan.alignment))
    for step, v in enumerate(plan.order.tolist()):
        if graph.workspace_bytes[v] > 0:
            buffers["workspace", v] = (step, step + 1, _rounded(graph.workspace_bytes[v], plan.alignment))
    return buffers


def with_layout(graph: Graph, plan: Plan) -> Plan:
    """Return the plan with every buffer at the lowest offset that is free."""
    buffers = buffers_of(graph, plan)
    offsets, workspace_offsets = plan.offsets.copy(), plan.workspace_offsets.copy()
    placed: list[tuple[int, int, int, int]] = []  # first, last, offset, end
    for (kind, i), (first, last, size) in buffers.items():
        offset = 0
        for _, _, bottom, top in sorted((b for b in placed if b[0] < last and first < b[1]), key=lambda b: b[2]):
            if offset + size <= bottom:
                break
            offset = max(offset, top)
        placed.append((first, last, offset, offset + size))
        (offsets if kind == "tensor" else workspace_offsets)[i] = offset
    load = max(
        (sum(size for first, last, size in buffers.values() if first <= step < last) for step in range(graph.num_ops)),
        default=0,
    )
    arena = max((end for *_, end in placed), default=0)
    return replace(plan, offsets=offsets, workspace_offsets=workspace_offsets, arena_bytes=arena, load_bytes=load)


def _rounded(size: int, alignment: int) -> int:
    return -(-int(size) // alignment) * alignment
