"""Losses in chunks of rows: what is found, what the chunked graph is, what is proved of it, and plans with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import olla
from olla import Graph, PlanError, _core
from olla.check.chunked import check_chunked
from olla.chunk import chunked
from olla.chunk.losses import regions
from olla.cli import main
from olla.plan import Chunked
from olla.plan.chunks import Part
from olla.plan.rewrite import read_rewrites
from tests.support.training import LOGITS, ROWS, LanguageModel


def peak_of(graph: Graph) -> int:
    return _core.profile(graph.core, np.arange(graph.num_ops, dtype=np.int32)).peak_bytes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 3, 8, 64, 1000])
def test_chunks_are_complete_and_only_the_logits_are_cut(bias: bool, num_chunks: int) -> None:
    graph = LanguageModel(bias=bias).build()
    found = chunked(graph, num_chunks)
    check_chunked(graph, found)
    k = min(num_chunks, ROWS)
    assert found.num_losses == 1
    assert int(found.chunk.max()) + 1 == k
    for v in regions(graph)[0].ops:
        of_op = found.origin == v
        if graph.flops[v]:
            assert found.graph.flops[of_op].sum() == pytest.approx(graph.flops[v], rel=0.01)
    for name in (Part.LOGITS, Part.LOG_PROBS, Part.PROBS):
        written = [int(found.graph.writes.of(int(i))[0]) for i in np.flatnonzero(found.part == name)]
        assert found.graph.tensor_bytes[written].sum() == LOGITS
    assert (
        found.graph.mutates.item == found.graph.writes.of(int(np.flatnonzero(found.part == Part.INPUT_GRAD)[0]))[0]
    ).sum() == k - 1


def test_more_chunks_need_less_memory() -> None:
    graph = LanguageModel().build()
    peaks = [peak_of(chunked(graph, k).graph) for k in (1, 2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peak_of(graph) - 2 * LOGITS


@pytest.mark.parametrize("case", ["scaled_by_loss", "weights", "keep"])
def test_a_loss_whose_chunks_would_differ_stays_whole(case: str) -> None:
    graph = LanguageModel(**{case: True}).build()
    found = chunked(graph, 8)
    assert found.num_losses == 0
    assert found.graph.digest == graph.digest
    plan = olla.plan(graph, max_slowdown=0.5, chunked_loss=8, time_limit=2.0)
    assert plan.chunked is None
    assert plan.message.startswith("No loss was chunked")
    olla.check(graph, plan)


def test_small_logits_stay_whole() -> None:
    model = LanguageModel()
    model.builder.tensor(10_000 * LOGITS, kind="parameter")
    graph = model.build()
    assert len(regions(graph)) == 1
    assert chunked(graph, 8).num_losses == 0


def test_ops_named_to_come_first_still_do() -> None:
    model = LanguageModel()
    last = model.builder.op("last", after=[2, 3])
    model.builder.op("very last", after=[last])
    graph = model.build()
    found = chunked(graph, 4)
    check_chunked(graph, found)
    names = found.graph.op_names
    assert [names[u] for u in found.graph.after.of(names.index("last"))] == ["layer_2", "layer_3"]
    assert [names[u] for u in found.graph.after.of(names.index("very last"))] == ["last"]


def tampered(found: Chunked, case: str) -> Chunked:
    rows = found.graph.to_dict()
    part = {
        name: int(np.flatnonzero(found.part == Part[name])[-1]) for name in ("LOGITS", "INPUT_GRAD", "PROBS", "COUNT")
    }
    origin, chunk, kinds = found.origin.copy(), found.chunk.copy(), found.part.copy()
    update = len(rows["ops"]) - 1
    match case:
        case "chunked_ops":
            origin[update] = origin[update - 1]
        case "chunked_parts":
            chunk[part["LOGITS"]] -= 1
        case "part of another op":
            origin[part["PROBS"]] = origin[part["LOGITS"]]
        case "chunked_tensors":
            rows["tensors"][-1]["bytes"] += 1
            rows["tensors"].append({"bytes": 4})
        case "chunked_inputs":
            rows["ops"][update]["reads"] = rows["ops"][update]["reads"][:1]
        case "reads the inside":
            logits = rows["ops"][part["LOGITS"]]["writes"]
            rows["ops"][update]["reads"] = [*rows["ops"][update]["reads"], *logits]
        case "chunked_results":
            rows["ops"][update]["mutates"] = []
        case "another operator":
            rows["ops"][update]["target"] = "aten.other"
        case "chunked_end":
            rows["outputs"] = []
        case "chunked_lengths":
            origin = origin[:-1]
    return replace(found, graph=Graph.from_dict(rows), origin=origin, chunk=chunk, part=kinds)


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("chunked_ops", "chunked_ops"),
        ("chunked_parts", "chunked_parts"),
        ("part of another op", "chunked_parts"),
        ("chunked_tensors", "chunked_tensors"),
        ("chunked_inputs", "chunked_inputs"),
        ("reads the inside", "chunked_inputs"),
        ("chunked_results", "chunked_results"),
        ("another operator", "chunked_results"),
        ("chunked_end", "chunked_end"),
        ("chunked_lengths", "chunked_lengths"),
    ],
)
def test_a_graph_that_is_not_the_original_in_chunks_is_refused(case: str, rule: str) -> None:
    graph = LanguageModel().build()
    with pytest.raises(PlanError) as caught:
        check_chunked(graph, tampered(chunked(graph, 4), case))
    assert caught.value.rule == rule


def test_a_plan_with_chunks_is_checked_against_the_original_and_survives_its_file(tmp_path: Path) -> None:
    graph = LanguageModel().build()
    whole = olla.plan(graph, max_slowdown=9.0, time_limit=2.0)
    plan = olla.plan(graph, max_slowdown=9.0, time_limit=2.0, chunked_loss=8)  # mostly launches: the step is tiny
    assert plan.chunked is not None
    assert (plan.source_digest, plan.goal["chunked_loss"]) == (graph.digest, 8)
    assert plan.slowdown <= 9.0
    assert plan.base_seconds == pytest.approx(whole.base_seconds)
    assert plan.peak_lower_bound_bytes <= plan.peak_bytes < whole.peak_bytes
    assert "in 8 chunks of rows" in str(plan)
    plan.save(tmp_path / "plan.json.gz")
    loaded = olla.Plan.load(tmp_path / "plan.json.gz")
    olla.check(graph, loaded)
    olla.check(loaded.graph, loaded)
    other = tampered(plan.chunked, "reads the inside")
    with pytest.raises(PlanError) as caught:
        olla.check(graph, replace(plan, rewrites=(other, *plan.rewrites[1:])))
    assert caught.value.rule == "chunked_inputs"


def test_a_budget_that_the_step_fits_needs_no_chunks() -> None:
    graph = LanguageModel().build()
    plan = olla.plan(graph, budget=10 * peak_of(graph), chunked_loss=8, time_limit=2.0)
    assert (plan.chunked, plan.added_seconds) == (None, 0.0)
    assert "the step fits without" in plan.message


def test_chunks_that_add_more_time_than_allowed_are_not_made() -> None:
    model = LanguageModel()
    graph = model.build()
    plan = olla.plan(graph, max_slowdown=0.0, chunked_loss=64, time_limit=2.0)
    assert (plan.chunked, plan.added_seconds) == (None, 0.0)
    assert "chunks alone add" in plan.message


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8", 5000])
def test_a_number_of_chunks_must_be_one(value: object) -> None:
    with pytest.raises(ValueError, match="chunked_loss is"):
        olla.plan(LanguageModel().build(), max_slowdown=0.1, chunked_loss=value)  # type: ignore[arg-type]


def test_chunks_are_for_a_goal() -> None:
    with pytest.raises(ValueError, match="chunked_loss is for a goal"):
        olla.plan(LanguageModel().build(), chunked_loss=8)


def test_the_command_chunks_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "graph.json")
    LanguageModel().build().save(path)
    wanted = ["plan", path, "--max-slowdown", "9", "--time-limit", "2", "--json", "--chunked-loss", "8"]
    assert main([*wanted, "-o", str(tmp_path / "plan.json")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["num_chunked_losses"], shown["goal"]["chunked_loss"]) == (1, 8)
    assert main(["check", path, str(tmp_path / "plan.json")]) == 0
    assert main(["plan", path, "--chunked-loss", "8"]) == 2
    assert "--chunked-loss is for a goal" in capsys.readouterr().err


def test_a_chunked_graph_cut_from_its_file_is_refused() -> None:
    content = chunked(LanguageModel().build(), 4).to_object()
    assert [rewrite.to_object() for rewrite in read_rewrites("rewrites", [content])] == [content]
    with pytest.raises(PlanError, match=r"has no 'loss' in 'rewrites\[0\]'"):
        read_rewrites("rewrites", [{key: value for key, value in content.items() if key != "loss"}])
    with pytest.raises(PlanError, match=r"the graph in 'rewrites\[0\].graph' is invalid"):
        read_rewrites("rewrites", [{**content, "graph": {}}])
