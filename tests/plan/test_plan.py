from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olla import Graph, GraphError, PlanError, _core
from olla.check.check import check
from olla.graph import nearest_order
from olla.graph.precedences import updates_stay
from olla.order import warm_starts
from olla.plan import Options, Plan, Status
from olla.planner import plan
from tests.support import oracle
from tests.support.patches import patch_core
from tests.support.plans import hard_graph, plan_of, training_step
from tests.support.strategies import graphs, graphs_with_order

ARRAYS = ("order", "offsets", "workspace_offsets", "before", "after")


def content(plan: Plan) -> dict[str, Any]:
    """All a plan says, but for the time it took."""
    return {
        name: value.tolist() if name in ARRAYS else value for name, value in vars(plan).items() if name != "seconds"
    }


@given(graph=graphs(), method=st.sampled_from(["auto", "program"]), alignment=st.sampled_from([1, 512]))
def test_plans_are_valid_and_never_worse_than_the_program_order(graph: Graph, method: str, alignment: int) -> None:
    result = plan(graph, method=method, alignment=alignment, time_limit=1.0)
    check(graph, result)
    assert result.peak_bytes <= result.program_peak_bytes
    assert result.lower_bound_bytes <= oracle.best_peak(graph) <= result.peak_bytes
    assert result.arena_bytes >= result.load_bytes
    assert (result.status is Status.OPTIMAL) == (result.gap == 0.0)
    if result.status is Status.OPTIMAL:
        assert result.peak_bytes == oracle.best_peak(graph)


@given(graphs(max_ops=5))
def test_the_integer_program_gives_valid_plans(graph: Graph) -> None:
    result = plan(graph, method="ilp", time_limit=10.0)
    check(graph, result)
    assert result.lower_bound_bytes <= oracle.best_peak(graph) <= result.peak_bytes <= result.program_peak_bytes


@given(graphs())
def test_equal_calls_give_equal_plans(graph: Graph) -> None:
    assert content(plan(graph, seed=3)) == content(plan(graph, seed=3))


@given(graphs_with_order())
def test_a_given_order_is_kept(drawn: tuple[Graph, list[int]]) -> None:
    graph, order = drawn
    result = plan(graph, order=order)
    assert result.order.tolist() == order
    assert result.peak_bytes == oracle.peak(graph, order)
    assert result.method == "given"


def test_a_given_order_that_breaks_a_dependency_is_refused() -> None:
    with pytest.raises(
        PlanError, match="runs op 2 at step 0, but needs op 0 before it, which runs at step 1"
    ) as caught:
        plan(training_step(), order=[2, 0, 1, 3, 4, 5])
    assert (caught.value.rule, caught.value.ids) == ("dependency", (0, 2))
    for order in ([0, 1, 2], [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 6]):
        with pytest.raises(PlanError, match="is no permutation") as caught:
            plan(training_step(), order=order)
        assert caught.value.rule == "permutation"


@given(graphs_with_order(), st.data())
def test_extra_precedences_are_kept_even_against_the_program_order(
    drawn: tuple[Graph, list[int]], data: st.DataObject
) -> None:
    graph, order = drawn  # some valid order, from which the precedences are taken
    step = {v: i for i, v in enumerate(order)}
    ops = st.integers(0, max(graph.num_ops - 1, 0))
    pairs = data.draw(st.lists(st.tuples(ops, ops).filter(lambda p: p[0] != p[1]), max_size=3)) if len(step) > 1 else []
    pairs = [(u, v) if step[u] < step[v] else (v, u) for u, v in pairs]
    result = plan(graph, precedences=pairs)
    seen = {v: i for i, v in enumerate(result.order.tolist())}
    assert all(seen[u] < seen[v] for u, v in pairs)
    assert list(zip(result.before.tolist(), result.after.tolist(), strict=True)) == pairs
    assert result.program_peak_bytes == oracle.peak(graph, range(graph.num_ops))


def test_precedences_that_form_a_cycle_are_refused_with_the_ops_named() -> None:
    with pytest.raises(GraphError, match="cycle") as caught:
        plan(training_step(), precedences=[(3, 1), (1, 2)])
    assert set(caught.value.ids) <= {1, 2, 3}


@given(graphs(max_ops=5), st.data())
def test_updates_that_stay_are_exactly_in_program_order_behind_what_precedes_them(
    graph: Graph, data: st.DataObject
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["update", "other"]), min_size=graph.num_ops, max_size=graph.num_ops))
    rows = graph.to_dict()
    for row, kind in zip(rows["ops"], kinds, strict=True):
        row["kind"] = kind
    graph = Graph.from_dict(rows)
    before, after = updates_stay(graph)
    assert len(before) <= graph.num_ops
    core = graph.core.constrained(before, after)
    updates = [v for v, kind in enumerate(kinds) if kind == "update"]

    def stay(order: tuple[int, ...]) -> bool:
        if not updates:
            return True
        before_first = set(order[: order.index(updates[0])])
        return [v for v in order if v in updates] == updates and set(range(updates[0])) <= before_first

    for order in oracle.orders(graph):
        assert core.is_order(np.array(order, dtype=np.int32)) == stay(order)
    check(graph, plan(graph, updates_may_move=False))


def test_updates_that_may_move_save_memory_and_those_that_stay_do_not() -> None:
    moved, stayed = plan(training_step()), plan(training_step(), updates_may_move=False)
    assert moved.peak_bytes < stayed.peak_bytes == stayed.program_peak_bytes
    assert stayed.order.tolist()[-2:] == [4, 5]


@given(graphs_with_order(), st.data())
def test_the_nearest_order_is_valid_and_leaves_a_valid_order_alone(
    drawn: tuple[Graph, list[int]], data: st.DataObject
) -> None:
    graph, order = drawn
    assert nearest_order(graph.core, np.array(order, dtype=np.int32)).tolist() == order
    wanted = np.array(data.draw(st.permutations(range(graph.num_ops))), dtype=np.int32)
    assert oracle.is_order(graph, nearest_order(graph.core, wanted).tolist())


def test_a_plan_without_a_layout_has_no_arena() -> None:
    result = plan(training_step(), layout=False)
    assert (result.arena_bytes, result.load_bytes, result.fragmentation) == (0, 0, 0.0)
    assert set(result.offsets.tolist()) == {-1}


def test_a_plan_says_where_its_peak_is_and_what_lives_there() -> None:
    graph = training_step()
    result = plan(graph, method="program")
    assert result.peak_op == (3, "backward_0")
    assert [(t.id, t.bytes, t.producer) for t in result.peak_tensors] == [
        (6, 400, "backward_0"),
        (7, 400, "backward_1"),
        (5, 200, "backward_1"),
        (2, 64, ""),
        (4, 4, "forward_1"),
    ]
    assert result.saved_bytes == 0
    first = plan(graph, order=[0, 1, 2, 5, 3, 4])
    assert first.saved_bytes == 200


def test_an_empty_graph_has_an_empty_optimal_plan() -> None:
    result = plan(Graph.builder("empty").build())
    assert (result.status, result.peak_bytes, result.peak_op, result.arena_bytes) == (Status.OPTIMAL, 0, None, 0)


def test_paths_and_captured_steps_are_planned_like_their_graph(tmp_path: Path) -> None:
    graph = training_step()
    graph.save(tmp_path / "g.json.gz")
    from_file = plan(tmp_path / "g.json.gz")
    captured = plan(SimpleNamespace(graph=graph, seconds={"trace": 1.5, "fold": 0.5}))
    assert content(from_file) == content(captured) == content(plan(graph))
    assert captured.seconds["capture"] == 2.0
    assert "read" in from_file.seconds
    with pytest.raises(TypeError, match=r"cannot plan a int: expected an olla\.Graph, the path"):
        plan(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"method": "magic"}, "method is 'magic', expected one of auto, ilp"),
        ({"time_limit": -1.0}, "time_limit is -1.0"),
        ({"time_limit": float("nan")}, "time_limit is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"alignment": 0}, "alignment is 0"),
        ({"order": [[0]]}, r"order is an array of int64 with shape \(1, 1\)"),
        ({"order": [0.5]}, "order is an array of float64"),
        ({"precedences": [(1, 2, 3)]}, "precedences must be pairs"),
        ({"precedences": [(2**40, 1)]}, "precedences must be pairs"),
    ],
)
def test_an_option_out_of_range_is_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(training_step(), **option)


def test_options_are_kept_in_the_plan() -> None:
    options = plan(training_step(), seed=5, precedences=[(0, 1)]).options
    assert options == Options(seed=5, precedences=((0, 1),)).record()
    assert (options["seed"], options["num_precedences"], options["order_given"]) == (5, 1, False)


@pytest.mark.parametrize("stage", ["order", "layout", "hoist"])
def test_an_interrupt_in_any_stage_gives_the_best_plan_so_far(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = getattr(warm_starts if stage == "hoist" else _core, stage), []

    def interrupted_once(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args, **options)

    if stage == "hoist":
        monkeypatch.setattr(warm_starts, stage, interrupted_once)
    else:
        patch_core(monkeypatch, stage, interrupted_once)
    graph = hard_graph() if stage == "hoist" else training_step()  # easy graphs need no warm starts
    result = plan(graph, time_limit=20.0)
    check(graph, result)
    assert calls
    assert "interrupted" in result.message
    assert result.arena_bytes > 0
    if stage == "order":
        assert (result.status, result.peak_bytes) == (Status.FEASIBLE, result.program_peak_bytes)


def test_ctrl_c_during_a_search_ends_it_with_a_plan() -> None:
    """A real signal in a fresh process, where the interpreter's own handler is in place."""
    program = f"""
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without one
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.patches import patch_core
from tests.support.plans import hard_graph
from olla import plan
graph = hard_graph()
seen = []
def progress(stage, seconds, value, bound):
    seen.append(stage)
    signal.raise_signal(signal.SIGINT)
start = time.perf_counter()
result = plan(graph, time_limit=60.0, progress=progress)
print(len(seen), result.status.value, "interrupted" in result.message, time.perf_counter() - start < 30)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split()[1:] == ["feasible", "True", "True"]
    assert int(run.stdout.split()[0]) >= 1


def test_progress_that_answers_false_ends_the_search_and_one_that_raises_is_heard() -> None:
    graph = hard_graph()
    result = plan(graph, time_limit=60.0, progress=lambda *_: False)
    check(graph, result)
    assert result.status is Status.FEASIBLE
    assert "interrupted" in result.message
    assert result.seconds["total"] < 30

    def broken(*_: object) -> bool:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        plan(graph, time_limit=60.0, progress=broken)


def test_the_time_limit_covers_the_whole_call() -> None:
    result = plan(hard_graph(), time_limit=1.0)
    assert result.status is Status.FEASIBLE
    assert 0 < result.gap < 1
    assert "longer time limit" in result.message
    assert result.seconds["total"] < 3


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_saved_plan_is_loaded_unchanged(name: str, tmp_path: Path) -> None:
    graph = training_step()
    result = plan(graph)
    result.save(tmp_path / name)
    loaded = Plan.load(tmp_path / name)
    assert content(loaded) == content(result)
    assert loaded.seconds == result.seconds
    assert [getattr(loaded, a).dtype for a in ARRAYS] == [getattr(result, a).dtype for a in ARRAYS]
    check(graph, loaded)
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@given(graphs_with_order())
def test_every_plan_survives_a_file(drawn: tuple[Graph, list[int]]) -> None:
    graph, order = drawn
    result = plan_of(graph, order)
    assert content(Plan.from_object(json.loads(json.dumps(result.to_object())))) == content(result)


def broken_contents() -> list[tuple[str, Any, str]]:
    return [
        ("format", "olla-graph", "'olla-plan': this is no plan"),
        ("version", 1, "version is 1, expected 3"),
        ("version", True, "version is True"),
        ("status", "perfect", "status: 'perfect' is not a valid Status"),
        ("status", 1, "status is 1, expected text"),
        ("graph_name", "\ud800", "graph_name is .* without lone surrogates"),
        ("num_ops", "6", "num_ops is '6'"),
        ("peak_bytes", -1, "peak_bytes is -1"),
        ("peak_bytes", 1.0, "peak_bytes is 1.0"),
        ("order", "012345", "order is '012345', expected a list"),
        ("order", [0, 1, 2**31], r"order\[2\] is 2147483648"),
        ("order", [0, True], r"order\[1\] is True"),
        ("offsets", [None], r"offsets\[0\] is None"),
        ("offsets", [2**63], r"offsets\[0\] is 9223372036854775808"),
        ("seconds", {"order": -1}, r"seconds\['order'\] is -1"),
        ("seconds", {"order": 10**400}, r"seconds\['order'\] is "),
        ("seconds", [], "seconds is a list of 0"),
        ("options", {"x": [1]}, r"options\['x'\] is a list of 1"),
        ("options", None, "options is None"),
        ("peak_op", [1], "peak_op is a list of 1"),
        ("peak_tensors", [[1, "x", 2]], r"peak_tensors\[0\] is a list of 3"),
        ("peak_tensors", 3, "peak_tensors is 3"),
    ]


@pytest.mark.parametrize(("key", "value", "message"), broken_contents())
def test_a_wrong_value_in_a_file_is_named_with_the_file(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(training_step()).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(str(path))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "plan.json"
    plan(training_step()).save(whole)
    data = whole.read_bytes()
    broken = tmp_path / "broken.json"
    cases = [data[: len(data) // 2], gzip.compress(data)[:-20], b"", b"[1]", b"\xff", b"{}"]
    cases.append(data.replace(b'"offsets"', b'"offset"'))
    for case in cases:
        broken.write_bytes(case)
        with pytest.raises(PlanError, match=str(broken)):
            Plan.load(broken)
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="cannot be written"):
        Plan.load(whole).save(tmp_path / "missing" / "plan.json")


def test_a_file_of_random_changes_is_read_or_refused_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(training_step()).save(path)
    data, random = bytearray(path.read_bytes()), np.random.default_rng(0)
    num_refused = 0
    for _ in range(500):
        changed = data.copy()
        for position in random.integers(0, len(data), size=random.integers(1, 4)):
            changed[position] = random.choice(list(b'0129-.,:[]{}"etrufalsn\x00\xff'))
        path.write_bytes(changed)
        try:
            Plan.load(path)
        except PlanError:
            num_refused += 1
    assert num_refused > 250


def test_a_plan_is_refused_for_another_graph() -> None:
    result = plan(training_step())
    with pytest.raises(PlanError, match="plan this graph anew") as caught:
        check(Graph.builder("other").build(), result)
    assert caught.value.rule == "digest"


def test_a_plan_cannot_be_changed_by_accident() -> None:
    result = plan(training_step())
    with pytest.raises(ValueError, match="read-only"):
        result.order[0] = 1
    assert replace(result, peak_bytes=1).gap != result.gap
