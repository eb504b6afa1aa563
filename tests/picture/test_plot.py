"""Pages of plans: what is in them is what the plan says."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import olla
from olla import _core
from olla.base import human_bytes
from olla.cli.parser import main
from olla.errors import PlanError
from olla.picture.plot import page_data
from olla.picture.scene import scene_of
from tests.support.plans import hard_graph, training_step
from tests.support.strategies import graphs

TYPES = {
    "first": np.float64,
    "last": np.float64,
    "size": np.float64,
    "offset": np.float64,
    "op": np.uint32,
    "remark": np.uint8,
}


def columns(run: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(base64.b64decode(run[name]), kind) for name, kind in TYPES.items() if name in run}


def peak_of(run: dict[str, Any]) -> int:
    found, change = columns(run), np.zeros(run["num_steps"] + 1)
    np.add.at(change, found["first"].astype(int), found["size"])
    np.subtract.at(change, found["last"].astype(int), found["size"])
    return int(np.cumsum(change[:-1]).max(initial=0))


@given(graphs(min_ops=1))
def test_peaks_before_and_after_are_those_of_graph_and_plan(graph: olla.Graph) -> None:
    plan = olla.plan(graph, time_limit=1)
    data = page_data(scene_of(graph, plan))
    assert peak_of(data["before"]) == _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes
    assert peak_of(data["after"]) == plan.peak_bytes


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}])
def test_rectangles_are_those_of_the_plan(goal: dict[str, Any]) -> None:
    graph = training_step()
    plan = olla.plan(graph, **goal)
    planned, found = plan.graph or graph, columns(page_data(scene_of(graph, plan))["after"])
    lives = _core.profile(planned.core, plan.order)
    inside = found["offset"] < plan.arena_bytes
    drawn = sorted(zip(*(found[n][inside].tolist() for n in ("first", "last", "size", "offset")), strict=True))
    tensors = np.flatnonzero((plan.offsets >= 0) & (planned.tensor_bytes > 0))
    expected = [(lives.first[t], lives.last[t], planned.tensor_bytes[t], plan.offsets[t]) for t in tensors]
    for step, op in enumerate(plan.order):
        if planned.workspace_bytes[op]:
            expected.append((step, step + 1, planned.workspace_bytes[op], plan.workspace_offsets[op]))
    assert drawn == sorted(expected)


def test_ops_that_run_again_are_named() -> None:
    builder = olla.Graph.builder("again")
    batch = builder.tensor(8, kind="input")
    wide, narrow, wider, small, last = (builder.tensor(n) for n in (1000, 8, 2000, 8, 8))
    builder.op("cheap", reads=[batch], writes=[wide], kind="forward", moved_bytes=1)
    for name, read, written in (("shrink", wide, narrow), ("grow", narrow, wider), ("reduce", wider, small)):
        builder.op(name, reads=[read], writes=[written], kind="forward", moved_bytes=1)
    builder.op("end", reads=[small, wide], writes=[last], kind="backward", moved_bytes=1)
    graph = builder.build()
    plan = olla.plan(graph, minimise="peak")
    assert plan.num_recomputed == 1
    data = page_data(scene_of(graph, plan))
    after = columns(data["after"])
    again = [data["texts"][op] for op, remark in zip(after["op"], after["remark"], strict=True) if remark]
    assert (again, data["remarks"][1]) == (["cheap"], "recomputed")


def test_bounds_are_of_what_they_say() -> None:
    graph = training_step()
    plain, rewritten = olla.plan(graph), olla.plan(graph, minimise="peak")
    figures, others = (dict(scene_of(graph, plan).figures) for plan in (plain, rewritten))
    assert figures["lower bound"] == human_bytes(plain.lower_bound_bytes)
    assert others["lower bound"] == human_bytes(rewritten.peak_lower_bound_bytes)


def test_before_is_the_graph_that_was_given_also_where_it_was_rewritten() -> None:
    graph = training_step()
    plan = olla.plan(graph, minimise="peak")
    assert plan.rewrites
    figures = dict(scene_of(graph, plan).figures)
    program = _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes
    assert figures["program order"] == human_bytes(program) != figures["as planned"]
    assert plan.graph is not None
    rewritten = plan.graph.program_peak_bytes
    assert dict(scene_of(plan.graph, plan).figures)["program order, as rewritten"] == human_bytes(rewritten)


def test_what_there_is_none_of_is_called_none() -> None:
    graph = training_step()
    figures = dict(scene_of(graph, olla.plan(graph, layout=False)).figures)
    for name in ("arena", "recomputed", "in place", "swapped", "added time"):
        assert figures[name] == "none", name
    assert figures["arena"] != dict(scene_of(graph, olla.plan(graph)).figures)["arena"]


def test_the_plan_of_another_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="give the graph that was planned"):
        olla.plot(hard_graph(), olla.plan(training_step()), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    builder = olla.Graph.builder("</script><script>alert(1)</script>")
    builder.op("op", reads=[], writes=[builder.tensor(8, name="</script>")])
    graph = builder.build()
    olla.plot(graph, olla.plan(graph), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("</script>") == 2
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    assert json.loads(text[1])["title"].startswith("</script>")


def test_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    olla.plot(training_step(), olla.plan(training_step()), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert "default-src 'none'" in page  # the browser sees to it, too


def test_modules_and_lines_of_the_given_graph_are_found_also_where_it_was_rewritten() -> None:
    graph = training_step()
    modules, sources = ([f"{what} {v}" for v in range(graph.num_ops)] for what in ("module", "line"))
    graph = dataclasses.replace(graph, modules=modules, sources=sources)
    plan = olla.plan(graph, minimise="peak")
    data = page_data(scene_of(graph, plan))
    given = np.frombuffer(base64.b64decode(data["after"]["given"]), np.uint32)
    assert given.tolist() == plan.origin[plan.order].tolist()
    for what, texts in (("module", modules), ("source", sources)):
        numbers = np.frombuffer(base64.b64decode(data["given"][what]), np.uint32)
        assert [data["texts"][n] for n in numbers] == texts


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, plan, page = (str(tmp_path / name) for name in ("graph.json", "plan.json", "page.html"))
    training_step().save(graph)
    assert main(["plan", graph, "-o", plan]) == 0
    assert main(["show", plan, "--graph", graph, "--html", page]) == 0
    assert "two layers" in Path(page).read_text()
    capsys.readouterr()
    assert main(["show", plan, "--html", page]) == 2
    assert "--html needs the graph" in capsys.readouterr().err
