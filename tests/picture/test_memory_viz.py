"""Plans in PyTorch's memory viewer: the same peak, the same addresses, and a file that torch reads."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import olla
from olla.cli.parser import main
from olla.errors import PlanError
from olla.picture.memory_viz import snapshot
from tests.support.plans import hard_graph, training_step
from tests.support.strategies import graphs


def peak_of(events: list[dict[str, Any]]) -> int:
    """Return the most bytes alive after any event; nothing may be freed twice, or lie where something else does."""
    live: dict[int, int] = {}
    total = peak = 0
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(a >= address + size or a + s <= address for a, s in live.items())
            live[address] = size
            total += size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
            total -= size
        peak = max(peak, total)
    return peak


@given(graphs())
def test_the_peak_is_the_plans_to_the_byte(graph: olla.Graph) -> None:
    plan = olla.plan(graph, time_limit=1)
    assert peak_of(snapshot(graph, plan)["device_traces"][0]) == plan.peak_bytes


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}, {"layout": False}])
def test_rewritten_steps_and_orders_without_a_layout(goal: dict[str, Any]) -> None:
    graph = training_step()
    plan = olla.plan(graph, **goal)
    assert peak_of(snapshot(graph, plan)["device_traces"][0]) == plan.peak_bytes


def test_offsets_are_those_of_the_plan() -> None:
    graph = training_step()
    plan = olla.plan(graph)
    (events,) = snapshot(graph, plan)["device_traces"]
    base = min(e["addr"] for e in events)
    places = {e["addr"] - base for e in events if e["action"] == "alloc" and e["frames"][0]["filename"] == "temporary"}
    assert places == {int(o) for o, size in zip(plan.offsets, graph.tensor_bytes, strict=True) if o >= 0 and size}


def test_the_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(PlanError, match="give the graph that was planned"):
        snapshot(hard_graph(), olla.plan(training_step()))


@pytest.mark.torch
def test_torch_reads_the_file(tmp_path: Path) -> None:
    memory_viz = pytest.importorskip("torch.cuda._memory_viz")
    graph = training_step()
    olla.memory_viz(graph, olla.plan(graph), tmp_path / "step.pickle")
    found = pickle.loads((tmp_path / "step.pickle").read_bytes())
    events = found["device_traces"][0]
    told = re.findall(r"= MEM\[(\d+):([\d.]+)B\]", memory_viz.trace(found))
    assert [(int(a), float(n)) for a, n in told] == [(e["addr"], e["size"]) for e in events if e["action"] == "alloc"]
    assert len(told) == sum(n > 0 for n in graph.tensor_bytes) + sum(n > 0 for n in graph.workspace_bytes)
    assert memory_viz.trace_plot(found)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, plan, out = (str(tmp_path / name) for name in ("graph.json", "plan.json", "step.pickle"))
    training_step().save(graph)
    assert main(["plan", graph, "-o", plan]) == 0
    assert main(["show", plan, "--graph", graph, "--memory-viz", out]) == 0
    events = pickle.loads(Path(out).read_bytes())["device_traces"][0]
    assert peak_of(events) == olla.Plan.load(plan).peak_bytes
    capsys.readouterr()
    assert main(["show", plan, "--memory-viz", out]) == 2
    assert "--graph" in capsys.readouterr().err
