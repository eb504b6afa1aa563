"""A planned step as one page: bytes over steps, before and after, the arena, and what is the largest in it."""

from __future__ import annotations

import base64
import json
import os
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from olla.base import files
from olla.graph import Graph
from olla.picture.blocks import Block, op_label
from olla.picture.scene import Scene, program_order, scene_of
from olla.plan import Plan

_RESIDENT = ("parameter", "buffer", "optimizer_state", "input", "constant")
_MADE = {
    "forward": "made in forward",
    "backward": "made in backward",
    "update": "made in updates",
    "other": "made by others",
}
KINDS = [*_RESIDENT, *_MADE.values(), "workspace"]
_REMARKS = ["", "recomputed", "copy between device and host"]
_TYPES = {"u": np.uint32, "d": np.float64, "b": np.uint8}
_NONE = 2**32 - 1  # no op
_PARTS = {"/*STYLE*/": "page.css", "/*RUNS*/": "runs.js", "/*PANELS*/": "panels.js", "/*PAGE*/": "page.js"}


def plot(graph: Graph, plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a page that shows where a step's memory goes: HTML in one file, which loads nothing from elsewhere.

    It has the bytes over the steps, as planned and in program order, in one chart, the arena as rectangles of time and
    place, and a list of what is the largest at the peak. Ops, tensors, modules and lines of code can be searched for;
    whatever is selected, by pointer or by keys, is told of.

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
    write_page(scene_of(graph, plan), path)


def write_page(scene: Scene, path: str | os.PathLike[str]) -> None:
    """Write the page of a scene; see `plot`."""
    folder = resources.files("olla.picture")
    page = folder.joinpath("page.html").read_text("utf-8")
    for mark, name in _PARTS.items():
        page = page.replace(mark, folder.joinpath(name).read_text("utf-8"))
    text = json.dumps(page_data(scene), separators=(",", ":")).replace("<", "\\u003c")
    files.write(path, page.replace("/*DATA*/", text).encode())


class _Texts:
    """Texts by number: each is written once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def page_data(scene: Scene) -> dict[str, Any]:
    """Return what the page shows, as JSON; see `runs.js`. Columns are in base64."""
    texts, given, plan = _Texts(), scene.given, scene.plan
    origin = plan.origin if given is not scene.planned else program_order(given)
    before = _run(given, program_order(given), scene.before, texts)
    after = _run(scene.planned, plan.order, scene.after, texts)
    before["given"] = _column(program_order(given), "u")
    after["given"] = _column(np.where(origin < 0, _NONE, origin)[plan.order], "u")
    after["remark"] = _column(_remarks(origin, plan.order), "b")
    return {
        "title": scene.title,
        "figures": list(scene.figures),
        "kinds": KINDS,
        "remarks": _REMARKS,
        "arena_bytes": scene.arena_bytes,
        "no_arena": scene.no_arena,
        "given": {
            "module": _column([texts(module) for module in given.modules], "u"),
            "source": _column([texts(source) for source in given.sources], "u"),
        },
        "before": before,
        "after": after,
        "texts": texts.all(),
    }


def _column(values: ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values).astype(_TYPES[kind]).tobytes()).decode()


def _run(graph: Graph, order: NDArray[np.int32], blocks: list[Block], texts: _Texts) -> dict[str, Any]:
    """Return one order of one graph, with its blocks."""
    kinds = {name: i for i, name in enumerate(KINDS)}
    step = np.append(np.argsort(order), _NONE)  # of op i; the last one is of none, -1

    def kind(block: Block) -> int:
        name = block.kind if block.op < 0 or block.kind == "workspace" else _MADE[graph.op_kinds[block.op]]
        return kinds.get(name, kinds[_MADE["other"]])

    return {
        "num_steps": graph.num_ops,
        "op": _column([texts(op_label(graph, op)) for op in order.tolist()], "u"),
        "op_kind": _column([kinds[_MADE[graph.op_kinds[op]]] for op in order.tolist()], "b"),
        "first": _column([b.first for b in blocks], "d"),
        "last": _column([b.last for b in blocks], "d"),
        "size": _column([b.size for b in blocks], "d"),
        "offset": _column([b.offset for b in blocks], "d"),
        "kind": _column([kind(b) for b in blocks], "b"),
        "label": _column([texts(b.label) for b in blocks], "u"),
        "maker": _column(step[[b.op for b in blocks]] if blocks else [], "u"),
    }


def _remarks(origin: NDArray[np.int32], order: NDArray[np.int32]) -> list[int]:
    """Return, for every step, what the plan has made of its op, as a number of a remark."""
    found, seen = [], set()
    for op in origin[order].tolist():
        found.append(2 if op < 0 else int(op in seen))
        seen.add(op)
    return found
