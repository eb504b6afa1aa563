"""Every method gives a valid plan that is no better than what is proved, and does what its source says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla import Graph, _core
from olla.check.check import check
from olla.methods.segments import assigned, links_of, merged, spine_of
from olla.order import Answer, Problem
from olla.pipeline import solver
from olla.plan import METHODS, Plan, Status
from olla.planner import plan
from tests.support import oracle
from tests.support.generate import random_graph, stack
from tests.support.patches import patch_core
from tests.support.plans import training_step
from tests.support.samples import chain, fork
from tests.support.strategies import buffers, graphs, graphs_with_order

OTHERS = [method for method in METHODS if method != "auto"]
QUICK = [method for method in OTHERS if method in ("roam", "smartpool", "inductor", "program")]


def test_every_method_has_a_module_that_solves() -> None:
    assert METHODS[0] == "auto"
    assert all(callable(solver(method)) for method in METHODS)


@pytest.mark.parametrize("method", QUICK)
@given(graph=graphs(), layout=st.booleans())
def test_every_method_gives_a_valid_plan_no_better_than_the_optimum(method: str, graph: Graph, layout: bool) -> None:
    result = plan(graph, method=method, layout=layout, alignment=4)
    check(graph, result)
    best = oracle.best_peak(graph)
    assert result.lower_bound_bytes <= best <= result.peak_bytes <= result.program_peak_bytes
    assert (result.status is Status.OPTIMAL) == (result.peak_bytes == result.lower_bound_bytes)
    assert result.arena_lower_bound_bytes <= result.arena_bytes
    assert result.method == method
    assert result.seconds["total"] > 0


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("seed", range(4))
def test_auto_is_never_worse_than_another_method(method: str, seed: int) -> None:
    graph = random_graph(30, seed=seed, max_bytes=1 << 16)
    ours, theirs = plan(graph), plan(graph, method=method, time_limit=5.0)
    check(graph, theirs)
    assert ours.peak_bytes <= theirs.peak_bytes
    assert ours.lower_bound_bytes <= theirs.peak_bytes
    assert theirs.lower_bound_bytes <= ours.peak_bytes


@pytest.mark.parametrize("method", QUICK)
def test_methods_obey_extra_precedences(method: str) -> None:
    graph = random_graph(25, seed=2)
    ancestors = [{v} for v in range(25)]
    for v in range(25):
        ancestors[v].update(*(ancestors[u] for u in graph.core.preds(v)))
    free = [(u, v) for v in range(25) for u in range(v + 1, 25) if v not in ancestors[u]]
    result = plan(graph, method=method, precedences=free[:1])
    check(graph, result)
    order = result.order.tolist()
    assert order.index(free[0][0]) < order.index(free[0][1])


@pytest.mark.parametrize("method", QUICK)
def test_an_empty_graph_is_planned_by_every_method(method: str) -> None:
    result = plan(Graph.builder("empty").build(), method=method)
    assert (result.peak_bytes, result.arena_bytes, result.status) == (0, 0, Status.OPTIMAL)


@given(graphs(max_ops=6))
def test_no_arena_is_below_the_bound_said(graph: Graph) -> None:
    result = plan(graph, alignment=4)
    for order in oracle.orders(graph):
        other = plan(graph, order=order, alignment=4)
        assert result.arena_lower_bound_bytes <= other.load_bytes


@pytest.mark.parametrize("method", ["roam", "smartpool", "inductor"])
def test_ctrl_c_anywhere_in_a_method_leaves_a_valid_plan(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = stack(400, family="convnet")
    for name in ("order", "lower_bound", "layout", "fit_in_order", "smartpool", "breadth_first_order"):
        calls: list[str] = []
        real = getattr(_core, name)

        def interrupted_once(
            *args: Any, real: Any = real, name: str = name, calls: list[str] = calls, **more: Any
        ) -> Any:
            calls.append(name)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return real(*args, **more)

        with monkeypatch.context() as patch:
            patch_core(patch, name, interrupted_once)
            result = plan(graph, method=method)
        check(graph, result)
        assert ("interrupted" in result.message) == bool(calls)


@pytest.mark.parametrize("name", ["order_ilp", "address_ilp"])
def test_ctrl_c_before_a_program_of_model_has_answered_leaves_a_valid_plan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    graph = stack(60, family="convnet")
    patch_core(monkeypatch, name, interrupted)
    result = plan(graph, method="model", time_limit=2.0)
    check(graph, result)
    assert "interrupted" in result.message


def test_an_answer_that_breaks_a_dependency_is_caught_by_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> Answer:
        return Answer(np.ascontiguousarray(problem.order[::-1]))

    monkeypatch.setattr("olla.order.program.solve", wrong)
    with pytest.raises(Exception, match="op") as caught:
        plan(training_step(), method="program")
    assert type(caught.value).__name__ in ("PlanError", "SolverError")


# smartpool ------------------------------------------------------------------------------------------------------------


def best_fit(lower: list[int], upper: list[int], size: list[int], outlives: list[bool], alignment: int) -> list[int]:
    """Best fit from the definition: every buffer looks at all that were placed before it."""
    offsets = [0] * len(size)
    order = sorted(range(len(size)), key=lambda i: (not outlives[i], -size[i], lower[i], i))
    placed: list[int] = []
    for i in order:
        if size[i] == 0 or lower[i] >= upper[i]:
            continue
        need = -(-size[i] // alignment) * alignment
        used = sorted(
            (offsets[j], offsets[j] - (-size[j] // alignment) * alignment)
            for j in placed
            if lower[j] < upper[i] and lower[i] < upper[j]
        )
        top, holes = 0, []
        for begin, end in used:
            if begin - top >= need:
                holes.append((begin - top, top))
            top = max(top, end)
        offsets[i] = min(holes)[1] if holes else top
        placed.append(i)
    return offsets


@given(buffers(max_buffers=14), st.data(), st.sampled_from([1, 8]))
def test_smartpool_is_best_fit_by_falling_size(
    drawn: tuple[list[int], list[int], list[int]], data: st.DataObject, alignment: int
) -> None:
    lower, upper, size = drawn
    outlives = data.draw(st.lists(st.booleans(), min_size=len(size), max_size=len(size)))
    columns = [np.array(column, dtype=np.int64) for column in drawn]
    flags = np.array(outlives, dtype=np.uint8)
    found = _core.smartpool(*columns, flags, alignment, 5.0, None)
    assert found.offsets.tolist() == best_fit(lower, upper, size, outlives, alignment)
    assert found.height_bytes == max(
        (o - (-s // alignment) * alignment for o, s in zip(found.offsets.tolist(), size, strict=True) if s), default=0
    )
    assert not found.cancelled


def test_smartpool_places_outputs_first_and_keeps_the_order() -> None:
    graph = training_step()
    result = plan(graph, method="smartpool")
    assert result.order.tolist() == list(range(graph.num_ops))
    assert [result.offsets[t] for t in graph.outputs] == [0]


# inductor -------------------------------------------------------------------------------------------------------------


def test_an_op_that_hundreds_wait_for_runs_once_in_every_schedule() -> None:
    builder = Graph.builder("star")
    first = builder.op("first", writes=[builder.tensor(1)])
    for _ in range(600):
        builder.op("next", writes=[builder.tensor(1)], after=[first])
    graph = builder.build()
    for schedule in (_core.least_peak_order, _core.breadth_first_order, _core.depth_first_order):
        assert graph.core.is_order(schedule(graph.core))


@pytest.mark.torch
def test_inductors_schedules_are_those_of_torch() -> None:
    pytest.importorskip("torch")
    from tests.support.pytorch import inductor

    steps = [stack(300, family="convnet"), stack(300), stack(600, clip=True)]
    for graph in [*steps, *(random_graph(seed, seed=seed) for seed in range(1, 120))]:
        theirs = inductor.heuristics(graph)
        ours = {
            "lpmf": _core.least_peak_order(graph.core),
            "bfs": _core.breadth_first_order(graph.core),
            "dfs": _core.depth_first_order(graph.core),
        }
        for name, order in ours.items():
            assert order.tolist() == theirs[name].order.tolist(), (graph.name, name)
        best = min(found.peak_bytes for found in theirs.values())
        assert plan(graph, method="inductor", layout=False).peak_bytes == best


@given(graphs())
def test_inductors_plan_is_the_best_of_its_four_orders(graph: Graph) -> None:
    result = plan(graph, method="inductor")
    peaks = [int(re.search(r"peak (\d+) bytes", line).group(1)) for line in result.details]  # type: ignore[union-attr]
    assert len(peaks) == 4
    assert result.peak_bytes == min(peaks)


# roam -----------------------------------------------------------------------------------------------------------------


def leaves_of(result: Plan) -> list[re.Match[str]]:
    pattern = (
        r"segment (\d+): \w+, steps (\d+) to (\d+)(?:, pair of (\d+))?: order (\w+), peak (\d+) bytes, bound (\d+)"
    )
    found = [re.fullmatch(pattern, line) for line in result.details]
    return [match for match in found if match]


@pytest.mark.parametrize("family", ["convnet", "transformer"])
def test_roam_reports_every_segment_with_its_status(family: Any) -> None:
    graph = stack(2000, family=family)
    result = plan(graph, method="roam")
    check(graph, result)
    leaves = leaves_of(result)
    assert [int(leaf[1]) for leaf in leaves] == list(range(len(leaves)))
    assert len(leaves) > 5
    ends = [int(leaf[3]) + 1 for leaf in leaves]
    assert [int(leaf[2]) for leaf in leaves] == [0, *ends[:-1]]
    assert ends[-1] == graph.num_ops
    live = _core.profile(graph.core, result.order).live_bytes
    for leaf in leaves:
        assert int(leaf[6]) == live[int(leaf[2]) : int(leaf[3]) + 1].max()
        assert leaf[5] == ("optimal" if leaf[6] == leaf[7] else "feasible")
    assert sum("layout" in line for line in result.details) >= len(leaves)
    assert f"{len(leaves)} segments" in result.message


def test_roam_pairs_forward_with_backward_segments_in_reverse() -> None:
    leaves = leaves_of(plan(stack(2000), method="roam"))
    pairs = [(int(leaf[1]), int(leaf[4])) for leaf in leaves if leaf[4] and int(leaf[1]) < int(leaf[4])]
    assert len(pairs) >= 2
    assert [b for _, b in pairs] == sorted((b for _, b in pairs), reverse=True)


def test_roam_saves_what_late_updates_cost() -> None:
    graph = stack(1500, family="convnet")
    result = plan(graph, method="roam")
    best = plan(graph).peak_bytes
    assert result.peak_bytes < result.program_peak_bytes
    assert result.peak_bytes - best <= 0.25 * (result.program_peak_bytes - best)


@settings(max_examples=60)
@given(graphs_with_order(max_ops=12), st.integers(0, 200), st.integers(1, 12))
def test_segments_in_a_row_are_a_valid_order(drawn: tuple[Graph, list[int]], target: int, most: int) -> None:
    graph, order = drawn
    if graph.num_ops == 0:
        return
    links = links_of(graph.core)
    spine = spine_of(graph, links, order)
    segments = assigned(graph, links, spine, order, float(target))
    assert len(segments) == spine.num_segments
    assert oracle.is_order(graph, [v for segment in segments for v in segment])
    leaves = merged(segments, most)
    assert [v for leaf in leaves for v in leaf] == [v for segment in segments for v in segment]
    sizes = [len(leaf) for leaf in leaves]
    whole = {len(segment) for segment in segments}
    assert all(size <= most or size in whole for size in sizes)


def test_every_op_of_a_chain_is_a_waist_and_none_amid_a_fork() -> None:
    straight = chain(5)
    assert spine_of(straight, links_of(straight.core), list(range(5))).segment == [0, 1, 2, 3, 4]
    forked = fork(3, 4)
    spine = spine_of(forked, links_of(forked.core), list(range(forked.num_ops)))
    assert spine.num_segments == 2
    assert spine.segment[0] == 0
    assert set(spine.segment[1:]) == {1}


def test_an_update_waits_where_it_would_raise_the_peak() -> None:
    """The gradient of the weight can be made at step 1; it fits only once the large activation is gone."""
    builder = Graph.builder("late")
    weight = builder.tensor(50, kind="parameter")
    small, large, last, gradient = builder.tensor(5), builder.tensor(100), builder.tensor(5), builder.tensor(50)
    builder.op("forward", writes=[small], kind="forward")
    builder.op("wide", reads=[small], writes=[large], kind="backward")
    builder.op("narrow", reads=[large], writes=[last], kind="backward")
    builder.op("end", reads=[last], kind="backward")
    builder.op("gradient", reads=[small], writes=[gradient], kind="backward")
    builder.op("update", reads=[gradient], mutates=[weight], kind="update")
    graph = builder.build()
    links, order = links_of(graph.core), list(range(6))
    spine = spine_of(graph, links, order)
    assert spine.segment == [0, 1, 2, 3, -1, -1]
    assert assigned(graph, links, spine, order, float("inf"))[0] == [0, 4, 5]
    eager, late = (assigned(graph, links, spine, order, target) for target in (float("inf"), 100.0))
    step = [next(k for k, segment in enumerate(made) if 4 in segment) for made in (eager, late)]
    assert step[0] < step[1]
    assert plan(graph, method="roam").peak_bytes == plan(graph).peak_bytes == oracle.best_peak(graph)


def test_details_survive_a_file_and_are_printed_on_request(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from olla.cli.parser import main

    graph = stack(300, family="convnet")
    graph.save(tmp_path / "graph.json")
    made = [str(tmp_path / "graph.json"), "-o", str(tmp_path / "plan.json"), "--method", "roam"]
    assert main(["plan", *made]) == 0
    assert "segment 0" not in capsys.readouterr().out
    assert main(["show", str(tmp_path / "plan.json"), "--verbose"]) == 0
    assert "segment 0" in capsys.readouterr().out
    loaded = Plan.load(tmp_path / "plan.json")
    assert any("segment 0" in line for line in loaded.details)
    assert loaded.arena_lower_bound_bytes > 0
