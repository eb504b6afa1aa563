"""Pages of plans: what is in them is what the plan says, and a browser shows it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import olla
from olla import _core
from olla.cli.parser import main
from olla.errors import PlanError
from olla.picture.plot import page_data
from tests.support.plans import hard_graph, training_step
from tests.support.strategies import graphs

TYPES = {"first": np.uint32, "last": np.uint32, "size": np.float64, "offset": np.float64, "label": np.uint32}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def columns(run: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(base64.b64decode(run[name]), kind) for name, kind in TYPES.items()}


def peak_of(run: dict[str, Any]) -> int:
    found, change = columns(run), np.zeros(run["num_steps"] + 1)
    np.add.at(change, found["first"], found["size"])
    np.subtract.at(change, found["last"], found["size"])
    return int(np.cumsum(change[:-1]).max(initial=0))


@given(graphs(min_ops=1))
def test_peaks_before_and_after_are_those_of_graph_and_plan(graph: olla.Graph) -> None:
    plan = olla.plan(graph, time_limit=1)
    data = page_data(graph, plan)
    assert peak_of(data["before"]) == _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes
    assert peak_of(data["after"]) == plan.peak_bytes


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}])
def test_rectangles_are_those_of_the_plan(goal: dict[str, Any]) -> None:
    graph = training_step()
    plan = olla.plan(graph, **goal)
    planned, found = plan.graph or graph, columns(page_data(graph, plan)["after"])
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
    assert [x for x in page_data(graph, plan)["labels"] if x.endswith("(runs again)")] == ["cheap (runs again)"]


def test_bounds_are_of_what_they_say() -> None:
    graph = training_step()
    plain, rewritten = olla.plan(graph), olla.plan(graph, minimise="peak")
    assert ("no order is below", plain.lower_bound_bytes) in page_data(graph, plain)["figures"]
    assert ("nothing that the goal allows is below", rewritten.peak_lower_bound_bytes) in (
        page_data(graph, rewritten)["figures"]
    )


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
    assert not re.search(r"https?://|src=|@import|url\(", (tmp_path / "page.html").read_text())


_LOOK = """<script>
setTimeout(() => {
  const arena = document.querySelectorAll("canvas")[2], box = arena.getBoundingClientRect();
  const at = (type, x, y, more) => arena.dispatchEvent(new (type === "wheel" ? WheelEvent : PointerEvent)(type,
    { clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, pointerId: 1, ...more }));
  at("wheel", 300, 300, { deltaY: -100 });
  at("pointermove", 120, 395, {});
  document.body.dataset.tip = document.getElementById("tip").textContent;
}, 300);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page with")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    graph, page = training_step(), tmp_path / "page.html"
    olla.plot(graph, olla.plan(graph), page)
    page.write_text(page.read_text() + _LOOK)
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1100"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 'data-ready="yes"' in shown
    assert re.search(r'data-tip="[^"]*\n(made in|workspace)[^"]* at [^"]*\nsteps \d+ to \d+"', shown)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, plan, page = (str(tmp_path / name) for name in ("graph.json", "plan.json", "page.html"))
    training_step().save(graph)
    assert main(["plan", graph, "-o", plan]) == 0
    assert main(["show", plan, "--graph", graph, "--html", page]) == 0
    assert "two layers" in Path(page).read_text()
    capsys.readouterr()
    assert main(["show", plan, "--html", page]) == 2
    assert "--html needs the graph" in capsys.readouterr().err


@pytest.mark.torch
def test_a_compiled_step_is_drawn(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=lambda model, batch: model(batch).square().mean())
    with pytest.raises(olla.ReplayError):
        step.plot(tmp_path / "page.html")
    step(torch.ones(4, 8))
    step.plot(tmp_path / "page.html")
    step.memory_viz(tmp_path / "step.pickle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "step.pickle"]
