"""A planned step in the format of PyTorch's memory viewer."""

from __future__ import annotations

import os
import pickle
from typing import Any

from olla.base import files
from olla.graph import Graph
from olla.picture.blocks import Block, blocks_of, planned_graph
from olla.plan import Plan

_ADDRESS = 0x7F00_0000_0000  # where memory begins in the snapshot


def memory_viz(graph: Graph, plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write what lies in memory as a planned step runs, for PyTorch's memory viewer.

    Drag the file to https://pytorch.org/memory_viz, or make a page of it with ``python -m torch.cuda._memory_viz
    trace_plot FILE``. Its timeline begins with what is there before the step; then every op allocates what it writes
    and its workspace, at the addresses of the plan, and frees what nothing reads any more. Its peak is
    ``plan.peak_bytes``, to the byte.

    Args:
        graph: the training step the plan was made for.
        plan: a plan, from `olla.plan` or a file.
        path: of the file, a pickle; it appears whole or not at all.

    Raises:
        PlanError: rule "digest"; the plan belongs to another graph.
        OSError: the file cannot be written.

    Complexity:
        O(m log m) for m = ops + tensors + uses.

    Example:
        >>> import os, tempfile, olla
        >>> builder = olla.Graph.builder("one op")
        >>> _ = builder.op("double", reads=[builder.tensor(8, kind="input")], writes=[builder.tensor(8)])
        >>> graph = builder.build()
        >>> path = os.path.join(tempfile.mkdtemp(), "step.pickle")
        >>> olla.memory_viz(graph, olla.plan(graph), path)
        >>> os.path.getsize(path) > 0
        True
    """
    files.write(path, pickle.dumps(snapshot(graph, plan)))


def snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return what `memory_viz` writes: the form of ``torch.cuda.memory._snapshot()``."""
    graph = planned_graph(graph, plan)
    blocks = blocks_of(graph, plan.order, plan)
    begin: list[list[Block]] = [[] for _ in range(graph.num_ops + 1)]
    end: list[list[Block]] = [[] for _ in range(graph.num_ops + 1)]
    for block in blocks:
        begin[int(block.first) + 1 if block.op >= 0 else 0].append(block)
        end[int(block.last)].append(block)
    events: list[dict[str, Any]] = []
    for time in range(graph.num_ops + 1):  # 0: before the step; i + 1: step i
        events += (_event("alloc", block, time) for block in begin[time])
        if 0 < time < graph.num_ops:  # what lives to the end is never freed
            for block in end[time]:
                events += (_event(action, block, time) for action in ("free_requested", "free_completed"))
    segment = {
        "device": 0, "address": _ADDRESS, "total_size": max((b.offset + b.size for b in blocks), default=0),
        "stream": 0, "segment_type": "large", "allocated_size": 0, "active_size": 0, "requested_size": 0,
        "blocks": [], "frames": [], "segment_pool_id": (0, 0), "is_expandable": False,
    }  # fmt: skip
    return {
        "device_traces": [events],
        "segments": [segment],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _event(action: str, block: Block, time: int) -> dict[str, Any]:
    frame = {"filename": block.kind, "name": block.label, "line": max(block.op, 0)}
    return {
        "action": action, "addr": _ADDRESS + block.offset, "size": block.size, "stream": 0, "time_us": time,
        "frames": [frame] if action == "alloc" else [],
    }  # fmt: skip
