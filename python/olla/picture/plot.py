"""A planned step as one page: bytes over steps, before and after, and the arena."""

from __future__ import annotations

import base64
import json
import os
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from olla import _core
from olla.base import files, human_bytes, percent
from olla.graph import Graph
from olla.picture.blocks import Block, blocks_of, op_label, planned_graph
from olla.plan import Plan

_RESIDENT = ("parameter", "buffer", "optimizer_state", "input", "constant")
_MADE = {
    "forward": "made in forward",
    "backward": "made in backward",
    "update": "made in updates",
    "other": "made by others",
}
KINDS = [*_RESIDENT, *_MADE.values(), "workspace"]
_TYPES = {"u": np.uint32, "d": np.float64, "b": np.uint8}


def plot(graph: Graph, plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a page that shows where a step's memory goes: HTML in one file, which loads nothing from elsewhere.

    It has the bytes of every kind over the steps, in program order and as planned, and the arena as rectangles of time
    and place; it zooms, and tells of whatever is pointed at.

    Args:
        graph: the training step the plan was made for.
        plan: a plan, from `olla.plan` or a file. Without a layout there is no arena to show.
        path: of the file; it appears whole or not at all.

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
        >>> path = os.path.join(tempfile.mkdtemp(), "step.html")
        >>> olla.plot(graph, olla.plan(graph), path)
        >>> os.path.getsize(path) > 0
        True
    """
    text = json.dumps(page_data(graph, plan), separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("olla.picture").joinpath("page.html").read_text("utf-8")
    files.write(path, page.replace("/*DATA*/", text).encode())


def page_data(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return what the page shows, as JSON; see `page.html`."""
    planned = planned_graph(graph, plan)
    labels: dict[str, int] = {}
    program = np.arange(graph.num_ops, dtype=np.int32)
    before = _run(graph, program, blocks_of(graph, program), labels, None)
    after = _run(planned, plan.order, blocks_of(planned, plan.order, plan), labels, _remarks(plan))
    bound = ("no order is below", plan.lower_bound_bytes)
    if plan.rewrites:
        bound = ("nothing that the goal allows is below", plan.peak_lower_bound_bytes)
    figures: list[tuple[str, int | str]] = [
        ("program order", int(_core.profile(graph.core, program).peak_bytes)),
        ("as planned", plan.peak_bytes),
        bound,
        ("resident", plan.resident_bytes),
        ("arena", plan.arena_bytes),
        ("run again", f"{plan.num_recomputed:,} ops"),
        ("in place", f"{plan.num_in_place:,} results"),
        ("swapped", human_bytes(plan.swapped_bytes)),
        ("added time", percent(plan.slowdown)),
    ]
    return {
        "title": f"{graph.name or 'a training step'}: {plan.method}, {plan.status.value}",
        "figures": figures,
        "kinds": KINDS,
        "arena_bytes": plan.arena_bytes,
        "before": before,
        "after": after,
        "labels": list(labels),
    }


def _run(
    graph: Graph, order: NDArray[np.int32], blocks: list[Block], labels: dict[str, int], remarks: list[str] | None
) -> dict[str, Any]:
    """Return one order of one graph as columns in base64."""

    def number(label: str) -> int:
        return labels.setdefault(label, len(labels))

    def column(values: ArrayLike, kind: str) -> str:
        return base64.b64encode(np.asarray(values).astype(_TYPES[kind]).tobytes()).decode()

    def remark(op: int) -> str:
        return remarks[op] if remarks is not None and op >= 0 else ""

    def kind(block: Block) -> str:
        return block.kind if block.op < 0 or block.kind == "workspace" else _MADE[graph.op_kinds[block.op]]

    places = {name: i for i, name in enumerate(KINDS)}
    made = [f"{b.label}{remark(b.op)}" for b in blocks]
    return {
        "num_steps": graph.num_ops,
        "ops": column([number(op_label(graph, op) + remark(op)) for op in order.tolist()], "u"),
        "first": column([b.first for b in blocks], "u"),
        "last": column([b.last for b in blocks], "u"),
        "size": column([b.size for b in blocks], "d"),
        "offset": column([b.offset for b in blocks], "d"),
        "kind": column([places.get(kind(b), len(_RESIDENT) + 3) for b in blocks], "b"),
        "label": column([number(label) for label in made], "u"),
    }


def _remarks(plan: Plan) -> list[str]:
    """Return of every op of the planned graph what the plan has made of it."""
    found = [""] * plan.num_ops
    seen: set[int] = set()
    origin = plan.origin.tolist()
    for op in plan.order.tolist():
        if origin[op] < 0:
            found[op] = " (copy between device and host)"
        elif origin[op] in seen:
            found[op] = " (runs again)"
        seen.add(origin[op])
    return found
