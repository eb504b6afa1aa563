"""The benchmarks' own tools: generated graphs, the rival's adaptor, reports."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings

from bench.recompute import floor
from bench.support import harness
from olla import Graph, _core
from olla.graph import profile_of, rules
from tests.support import generate
from tests.support.budget_oracle import Permissions, least_peak_bytes, tiny


def program_order(graph: Any) -> Any:
    return np.arange(graph.num_ops, dtype=np.int32)


@pytest.mark.parametrize("family", ["transformer", "convnet"])
@pytest.mark.parametrize(("optimizer", "clip"), [("adam", False), ("adam", True), ("sgd", False), ("none", False)])
@pytest.mark.parametrize("num_ops", [1000, 3000])
def test_generated_step_has_about_the_ops_asked_for(family: Any, optimizer: Any, clip: bool, num_ops: int) -> None:
    graph = generate.stack(num_ops, family=family, optimizer=optimizer, clip=clip)
    assert abs(graph.num_ops - num_ops) <= 0.03 * num_ops


def test_same_arguments_generate_the_same_step_and_another_seed_another() -> None:
    one, same, other = (generate.stack(1000, spread=0.3, seed=seed) for seed in (1, 1, 2))
    assert one.digest == same.digest
    assert one.digest != other.digest


def test_generated_step_survives_its_file(tmp_path: Path) -> None:
    graph = generate.stack(500, family="convnet")
    graph.save(tmp_path / "step.json.gz")
    assert type(graph).load(tmp_path / "step.json.gz").digest == graph.digest


def test_generated_updates_stand_last_and_mutate_every_trained_parameter() -> None:
    graph = generate.stack(1000)
    kinds = graph.op_kinds
    assert kinds == sorted(kinds, key=["forward", "backward", "update"].index)
    mutated = {int(t) for v, kind in enumerate(kinds) if kind == "update" for t in graph.mutates.of(v)}
    assert {t for t, kind in enumerate(graph.tensor_kinds) if kind in ("parameter", "optimizer_state")} <= mutated


def test_generated_peak_falls_when_updates_run_right_after_their_gradients() -> None:
    graph = generate.stack(1000, family="convnet", optimizer="sgd")
    ready: dict[int, int] = {}
    for v in range(graph.num_ops):
        preds = graph.core.preds(v)
        ready[v] = v if graph.op_kinds[v] != "update" else max((ready[int(u)] for u in preds), default=-1)
    order = np.array(sorted(range(graph.num_ops), key=lambda v: (ready[v], v)), dtype=np.int32)
    assert _core.profile(graph.core, order).peak_bytes < _core.profile(graph.core, program_order(graph)).peak_bytes


def test_clipping_makes_every_update_wait_for_the_last_gradient() -> None:
    graph = generate.stack(1000, optimizer="sgd", clip=True)
    last_backward = max(v for v, kind in enumerate(graph.op_kinds) if kind == "backward")
    after = {last_backward}
    for v in range(graph.num_ops):
        if any(int(u) in after for u in graph.core.preds(v)):
            after.add(v)
    parameters = {t for t, kind in enumerate(graph.tensor_kinds) if kind == "parameter"}
    updates = [v for v in range(graph.num_ops) if parameters & {int(t) for t in graph.mutates.of(v)}]
    assert updates
    assert set(updates) <= after


@pytest.mark.parametrize("seed", range(20))
def test_random_graph_has_exactly_the_ops_asked_for(seed: int) -> None:
    assert generate.random_graph(seed, seed=seed).num_ops == seed
    assert generate.random_graph(seed, seed=seed).digest == generate.random_graph(seed, seed=seed).digest


@pytest.mark.torch
@pytest.mark.skipif(metadata.version("torch").startswith("2.11."), reason="torch 2.11 estimates otherwise")
def test_inductors_orders_are_valid_and_its_estimate_is_our_peak() -> None:
    pytest.importorskip("torch")
    from torch._inductor import memory

    from tests.support.pytorch import inductor

    for seed in range(1, 60):
        graph = generate.random_graph(seed, seed=seed)
        found = inductor.heuristics(graph)
        assert list(found) == ["present", "lpmf", "bfs", "dfs"]
        problem = inductor.problem(graph)
        for heuristic in found.values():
            assert graph.core.is_order(heuristic.order)
            if graph.workspace_bytes.any():  # Inductor has no workspaces
                continue
            nodes = [problem.nodes[v] for v in heuristic.order]
            estimate, _ = memory.estimate_peak_memory(nodes, problem.freeable_inputs, problem.outputs)
            assert estimate + graph.resident_bytes == heuristic.peak_bytes


@pytest.mark.torch
def test_inductors_depth_first_sort_survives_a_deep_graph() -> None:
    pytest.importorskip("torch")
    from tests.support.pytorch import inductor

    builder = type(generate.random_graph(0)).builder("chain")
    tensor = builder.tensor(1)
    for v in range(5000):
        new = builder.tensor(5000 - v)
        builder.op("step", reads=[tensor], writes=[new])
        tensor = new
    assert inductor.heuristics(builder.build())["dfs"].order[-1] == 4999


def test_report_prints_numbers_and_writes_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = harness.Report("Title", ["name", "bytes"], [["a", 1234567], ["b", None]], {"most": 0.5})
    report.print()
    assert "1,234,567" in capsys.readouterr().out
    for suffix in (".md", ".csv", ".json"):
        report.save(tmp_path / f"out{suffix}")
    assert "| a | 1,234,567 |" in (tmp_path / "out.md").read_text()
    assert "a,1234567" in (tmp_path / "out.csv").read_text()
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0] == {"name": "a", "bytes": 1234567}
    assert str(Path.home()) not in (tmp_path / "out.md").read_text()


def test_absent_graph_folder_is_named_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_SHARED", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="OLLA_SHARED"):
        harness.graph_files(["gpt2_b1"])


@settings(max_examples=100, deadline=None)
@given(tiny())
def test_no_plan_is_below_what_every_set_of_live_tensors_proves(case: tuple[Graph, Permissions]) -> None:
    graph, allowed = case
    may = rules(graph, profile_of("a100"))._replace(in_place=np.array(allowed.in_place, dtype=np.uint8))
    bound, _ = floor.least_peak(graph, may, least_bytes=1)
    least = least_peak_bytes(graph, allowed, 1_000_000)
    assert bound <= least
    kept = len(graph.outputs) + int(graph.workspace_bytes.any()) + int(graph.donated.any())
    exact = kept == 0 and all(allowed.again)  # then the proof leaves nothing out
    event(f"exact: {exact}")
    assert not exact or bound == least
