"""What plans are measured against: the program order of the graph that was given, whatever became of it, everywhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla import Graph, Plan, PlanError
from olla.base import human_bytes
from olla.chunk import chunked
from olla.cli.parser import main
from olla.picture.scene import amount, peak_bytes, scene_of
from olla.plan import Swapped
from olla.plan.plan import of_last_graph
from olla.plan.texts import op_text
from olla.rewriting import needed_bytes
from olla.scale import plan_file, text
from tests.support import oracle, swaps
from tests.support.plans import training_step
from tests.support.samples import SHARED
from tests.support.training import LanguageModel, training_chain

GOALS: list[dict[str, Any]] = [{}, {"budget": "1GB"}, {"max_slowdown": 0.1}, {"minimise": "peak"}]
SHORT = {"time_limit": 1.0}
CAPTURED = SHARED / "graphs"


def two_branches() -> Graph:
    """A graph whose better order a rewriting begins with."""
    b = Graph.builder("two branches")
    data, loss = b.tensor(64, kind="input"), b.tensor(8)
    wide, half, wider, small = (b.tensor(n) for n in (4096, 2048, 8192, 16))
    b.op("widen", reads=[data], writes=[wide])
    b.op("halve", reads=[wide], writes=[half])
    b.op("widen more", reads=[data], writes=[wider])
    b.op("pool", reads=[wider], writes=[small])
    b.op("loss", reads=[half, small], writes=[loss])
    b.output(loss)
    return b.build()


def donated(workspace_bytes: int = 0) -> Graph:
    """A graph that lives on what is donated to it."""
    b = Graph.builder("donated")
    given, made, result = b.tensor(1000, kind="input", donated=True), b.tensor(1), b.tensor(1)
    b.op("make", writes=[made], workspace_bytes=workspace_bytes)
    b.op("use", reads=[given, made], writes=[result])
    b.output(result)
    return b.build()


GRAPHS = {
    "two branches": two_branches,
    "donated": donated,
    "workspaces": lambda: donated(workspace_bytes=3000),
    "updates": training_step,
    "in place and recomputed": lambda: training_chain(4),
    "loss": lambda: LanguageModel().build(),
    "swaps": swaps.chain,
}


def required_before(graph: Graph) -> int:
    """Return the peak of the program order, by the oracle that shares no code with the planners."""
    return oracle.peak(graph, range(graph.num_ops))


@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_goal_is_measured_against_the_program_order_of_the_given_graph(name: str, goal: dict[str, Any]) -> None:
    graph = GRAPHS[name]()
    plan = olla.plan(graph, **goal, **SHORT)
    before = required_before(graph)
    assert plan.program_peak_bytes == graph.program_peak_bytes == before
    assert plan.saved_bytes == before - plan.peak_bytes
    assert re.search(rf"peak before +\S+ \S+ +{before:,} ", str(plan))
    scene = scene_of(graph, plan)
    assert peak_bytes(scene.before, graph.num_ops) == before
    assert dict(scene.figures)["program order"] == amount(before)
    olla.check(graph, plan)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "14MB", "host_budget": "1GB"},
        {"max_slowdown": 0.1, "swap": True},
        {"method": "autoswap"},
        {"minimise": "peak", "recompute": False},
        {"minimise": "peak", "in_place": False},
        {"max_slowdown": 0.2, "precedences": [(0, 3)]},
        {"minimise": "peak", "updates_may_move": False, "layout": False},
    ],
    ids=str,
)
def test_every_lever_is_measured_against_the_same(options: dict[str, Any]) -> None:
    graph = swaps.chain()
    plan = olla.plan(graph, **options, **SHORT)
    assert plan.rewrites
    assert plan.program_peak_bytes == required_before(graph)
    olla.check(graph, plan)


def test_a_loss_in_chunks_is_measured_against_the_whole_one() -> None:
    graph = LanguageModel().build()
    plan = olla.plan(graph, max_slowdown=9.0, chunked_loss=8, **SHORT)
    assert plan.chunked is not None
    assert plan.program_peak_bytes == required_before(graph) > required_before(plan.chunked.graph)


def test_the_checker_counts_the_program_order_of_the_given_graph_itself() -> None:
    graph = two_branches()
    plan = olla.plan(graph, budget="9KB", **SHORT)
    assert plan.graph is not None
    assert plan.program_peak_bytes > required_before(plan.graph)
    for wrong in (plan.program_peak_bytes - 1, required_before(plan.graph)):
        with pytest.raises(PlanError, match="program_peak_bytes is reported as") as caught:
            olla.check(graph, replace(plan, program_peak_bytes=wrong))
        assert caught.value.rule == "program_peak"
        assert "rewritten" not in str(caught.value)
    olla.check(plan.graph, plan)
    olla.check(plan.graph, of_last_graph(plan))
    assert of_last_graph(plan).program_peak_bytes == required_before(plan.graph)


def test_a_page_of_the_rewritten_graph_alone_says_whose_program_order_it_draws() -> None:
    plan = olla.plan(two_branches(), budget="9KB", **SHORT)
    assert plan.graph is not None
    scene = scene_of(plan.graph, plan)
    assert peak_bytes(scene.before, plan.num_ops) == required_before(plan.graph)
    assert dict(scene.figures)["program order, as rewritten"] == amount(required_before(plan.graph))


def test_a_broken_rule_of_a_rewritten_graph_says_whose_numbers_it_names() -> None:
    graph = two_branches()
    plan = olla.plan(graph, budget="9KB", **SHORT)
    with pytest.raises(PlanError, match=r"^in the rewritten graph, peak_bytes is reported as"):
        olla.check(graph, replace(plan, peak_bytes=plan.peak_bytes + 1))


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak", "in_place": False}, {"budget": "2024"}], ids=str)
def test_what_is_donated_counts_in_what_a_plan_needs(goal: dict[str, Any]) -> None:
    plan = olla.plan(donated(), **goal, **SHORT)
    assert (plan.donated_bytes, plan.resident_bytes, plan.arena_bytes) == (1000, 0, 1024)
    assert needed_bytes(plan) == 2024
    with pytest.raises(PlanError) as caught:
        olla.check(donated(), replace(plan, donated_bytes=0))
    assert caught.value.rule == "donated_bytes"


def test_what_is_donated_counts_in_a_fit() -> None:
    rows = olla.fit(lambda n: donated(), memory=1500, sizes=(1,), slowdowns=()).rows
    assert [rows[0].ways[way].fits for way in ("planned", "least")] == [False, False]
    assert rows[0].ways["planned"].peak_bytes == 2024


@pytest.mark.parametrize("name", ["two branches", "in place and recomputed"])
def test_files_commands_and_folders_say_the_same_before(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = GRAPHS[name]()
    before = required_before(graph)
    source, saved = str(tmp_path / "graph.json"), str(tmp_path / "plan.json")
    graph.save(source)
    for options in ([], ["--max-slowdown", "0.3"], ["--minimise", "peak"]):
        assert main(["plan", source, "--time-limit", "1", "--json", "-o", saved, *options]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert (summary["program_peak_bytes"], summary["saved_bytes"]) == (before, before - summary["peak_bytes"])
        assert Plan.load(saved).program_peak_bytes == before
        for command in (["show", saved], ["show", saved, "--graph", source, "--html", str(tmp_path / "page.html")]):
            assert main(command) == 0
            assert re.search(rf"peak before +\S+ \S+ +{before:,} ", capsys.readouterr().out)
        assert main(["check", source, saved]) == 0
        capsys.readouterr()
    for goal in ({}, {"max_slowdown": 0.3}):
        result = plan_file(source, tmp_path / "plans", {**goal, **SHORT})
        assert result.figures["program_peak_bytes"] == before
        assert f" {human_bytes(before)} " in text([result])


def test_a_fit_has_the_program_order_beside_the_eager_loop() -> None:
    graph = training_step()
    found = olla.fit(lambda n: graph, memory=10**6, sizes=(1,), slowdowns=(0.1,))
    assert found.rows[0].program_peak_bytes == required_before(graph)
    assert f"program {human_bytes(required_before(graph))}" in str(found)
    assert found.to_dict()["rows"][0]["program_peak_bytes"] == required_before(graph)


def test_a_plan_of_before_is_refused_with_what_helps(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = olla.plan(two_branches(), budget="9KB", **SHORT).to_object()
    path.write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(PlanError, match="version is 2, expected 3: make the plan again") as caught:
        Plan.load(path)
    assert caught.value.rule == "version"


def shown(plan: Plan, graph: Graph) -> set[str]:
    """Check that the table names ops and tensors as the given graph does; return what it says became of the ops."""
    lines = str(plan).splitlines()
    at = next(line for line in lines if line.startswith("The peak is at"))
    for number, name in re.findall(r"op (\d+) \(([^)]*)\)", at):
        assert name.split(" [")[0] == graph.op_names[int(number)]  # the part of a loss stands in brackets
    for number, name in re.findall(r"tensor (\d+)(?: (\w+))? ", "\n".join(lines)):
        assert name in ("", graph.tensor_names[int(number)])  # a part of a tensor has no name
    return {op_text(plan, op, "x").partition("), ")[2] for op in plan.order.tolist()}


def named(graph: Graph) -> Graph:
    """The graph with a name for every tensor, but its number is not in it."""
    return replace(graph, tensor_names=[f"{chr(97 + t % 26)}{'x' * (t // 26)}" for t in range(graph.num_tensors)])


def test_texts_name_ops_and_tensors_as_the_given_graph_does() -> None:
    graph = named(training_chain(4))
    plan = olla.plan(graph, minimise="peak", **SHORT)
    assert plan.num_recomputed > 0
    assert "recomputed" in shown(plan, graph)
    assert "as rewritten" in str(plan).splitlines()[0]
    assert np.array_equal(graph.tensor_bytes[plan.tensor_origin], plan.graph.tensor_bytes)  # type: ignore[union-attr]

    graph = named(swaps.chain())
    plan = olla.plan(graph, max_slowdown=0.1, swap=True, **SHORT)
    assert plan.swapped is not None
    shown(plan, graph)
    copies = [op_text(plan, v, "x") for v in np.flatnonzero(plan.origin < 0).tolist()]
    assert len(copies) == 2 * len(plan.swapped.swaps.tensor)
    pattern = re.compile(r"tensor (\d+) (\w+), copied (to|back from) host memory")
    matches = [pattern.fullmatch(line) for line in copies]
    assert all(match and graph.tensor_names[int(match[1])] == match[2] for match in matches)
    for line in plan.details:
        if "in host memory for" in line:
            assert line.partition(",")[0] in graph.tensor_names


def test_parts_of_a_loss_in_chunks_are_those_of_the_whole_one() -> None:
    graph = named(LanguageModel().build())
    plan = olla.plan(graph, max_slowdown=9.0, chunked_loss=8, **SHORT)
    assert plan.chunked is not None
    assert {f"chunk {i} of 8" for i in range(1, 9)} | {"for all chunks"} <= shown(plan, graph)
    found = chunked(graph, 8)
    stands_for = found.tensors()
    assert len(stands_for) == found.graph.num_tensors
    for t in np.unique(stands_for[graph.num_tensors :]).tolist():
        parts = np.flatnonzero(stands_for == t)
        if t >= 0:
            assert found.graph.tensor_bytes[parts].sum() == graph.tensor_bytes[t]


def test_a_copy_stands_for_the_tensor_that_it_copies() -> None:
    graph = swaps.chain()
    plan = olla.plan(graph, max_slowdown=0.1, swap=True, recompute=False, **SHORT)
    last = plan.rewrite(Swapped)
    assert last is not None
    stands_for = last.tensors()
    back = [v for v in np.flatnonzero(last.origin < 0).tolist() if last.graph.targets[v] == "olla::swap_in"]
    for v in back:
        (t,) = last.graph.writes.of(v).tolist()
        assert last.graph.tensor_bytes[t] == graph.tensor_bytes[plan.tensor_origin[t]]
        assert stands_for[t] in last.swaps.tensor


def captured() -> list[Path]:
    """Return the captured graphs, the smaller ones first."""
    return sorted(CAPTURED.glob("*.json.gz"), key=lambda path: path.stat().st_size)


@pytest.mark.skipif(not captured(), reason=f"needs captured graphs in {CAPTURED}; set OLLA_SHARED to their folder")
@pytest.mark.parametrize("part", [slice(14), pytest.param(slice(14, None), marks=pytest.mark.slow)])
def test_captured_graphs_are_measured_against_their_own_program_order(part: slice) -> None:
    for path in captured()[part]:
        graph = Graph.load(path)
        before = required_before(graph)
        for goal in [*GOALS[2:], {}, {"budget": graph.program_peak_bytes}]:
            plan = olla.plan(graph, time_limit=0.2, layout=False, **goal)
            assert plan.program_peak_bytes == before, (path.name, goal)
            assert plan.saved_bytes == before - plan.peak_bytes >= 0
