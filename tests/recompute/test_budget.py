"""Plans with a budget: rewritten graphs that compute the same, within what was asked for, and with honest figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import BudgetError, Graph, Plan, PlanError, _core
from olla.graph import PROFILES, Lists, Rerun, rules
from olla.order.base_orders import early_updates
from olla.rewriting import needed_bytes
from tests.support.generate import random_graph
from tests.support.strategies import graphs
from tests.support.training import training_chain

A100 = PROFILES["a100"]


def plan(graph: Graph, *, time_limit: float = 2.0, **options: object) -> Plan:
    found = olla.plan(graph, time_limit=time_limit, **options)  # type: ignore[arg-type]
    assert found.recomputed is not None
    return found


@settings(max_examples=60, deadline=None)
@given(graphs(max_ops=8), st.integers(0, 3))
def test_any_rewritten_graph_computes_the_same_and_needs_what_the_search_says(graph: Graph, seed: int) -> None:
    """The whole curve: mutations, random ops, extra predecessors, donated tensors, workspaces and outputs included."""
    random = np.random.default_rng(seed)
    r = rules(graph, A100)._replace(
        seconds=random.uniform(0.0, 1.0, graph.num_ops), in_place=random.integers(0, 2, graph.num_ops).astype(np.uint8)
    )
    r = r._replace(rerun_seconds=r.seconds)
    order = np.arange(graph.num_ops, dtype=np.int32)
    for steps in range(4):
        search = r.evictor(graph, order)
        search.run(0, [0.0, 0.3, 1.0, math.inf][steps], _core.Limits(time_limit=10.0, max_work=None, progress=None))
        made = search.rewritten()
        names = ("reads", "writes", "mutates", "after")
        rewritten = Graph.from_arrays(
            tensor_bytes=made.tensor_bytes,
            donated=made.donated.astype(bool),
            workspace_bytes=made.workspace_bytes,
            random=made.random.astype(bool),
            outputs=made.outputs,
            **{name: Lists(*getattr(made, name)) for name in names},
        )
        from olla.check.recomputed import check_equivalent

        check_equivalent(graph, rewritten, made.origin, made.rerun, made.tensor_origin, r)
        program = np.arange(rewritten.num_ops, dtype=np.int32)
        assert _core.profile(rewritten.core, program).peak_bytes == search.peak
        added = r.seconds[made.origin].sum() - r.seconds.sum()
        assert added == pytest.approx(search.added_seconds, abs=1e-9)


def test_a_budget_is_met_by_the_arena_too_with_little_more_time_than_proved() -> None:
    graph = training_chain()
    base = olla.plan(graph).peak_bytes
    found = plan(graph, budget=int(0.7 * base))
    assert needed_bytes(found) <= 0.7 * base
    assert 0 < found.added_seconds_lower_bound <= found.added_seconds
    assert found.peak_lower_bound_bytes <= found.peak_bytes
    assert found.num_recomputed > 0
    olla.check(graph, found)
    olla.check(found.graph, found)


@pytest.mark.parametrize("seed", [4, 7, 15, 22, 34])
def test_a_budget_that_the_least_peak_fits_is_not_refused(seed: int) -> None:
    graph = random_graph(60, seed=seed, window=20, max_bytes=10_000_000)
    least = plan(graph, minimise="peak", time_limit=30.0)  # work ends both searches, on a busy machine too
    found = plan(graph, budget=needed_bytes(least), time_limit=30.0)
    assert needed_bytes(found) <= needed_bytes(least)
    assert found.added_seconds_lower_bound <= found.added_seconds
    olla.check(graph, found)


def test_dropout_and_updates_never_run_twice() -> None:
    graph = training_chain()
    found = plan(graph, minimise="peak")
    runs = [(graph.op_names[v], int(rerun)) for v, rerun in zip(found.origin, found.recomputed.rerun, strict=True)]
    names = [name for name, rerun in runs if rerun == Rerun.NEVER]
    for name in ("update", *(f"dropout_{i}" for i in range(8))):
        assert names.count(name) == graph.op_names.count(name)
    again = {rerun for name, rerun in runs if name.startswith("dropout_") and rerun and "b" not in name}
    assert again <= {Rerun.FIRST_RESULT, Rerun.REPLAY}
    assert not any(rerun for name, rerun in runs if name == "update")
    assert all(not found.graph.random[i] for i in np.flatnonzero(found.recomputed.rerun))


def test_numbers_are_drawn_again_only_behind_the_run_that_drew_them() -> None:
    graph = training_chain()
    found = plan(graph, minimise="peak")
    rerun = found.recomputed.rerun
    replays = np.flatnonzero(rerun == Rerun.REPLAY)
    assert len(replays) > 0
    own = {int(v): i for i, v in enumerate(found.origin) if rerun[i] == Rerun.NEVER}
    assert all(own[int(found.origin[i])] in found.graph.after.of(i) for i in replays)
    loose = replace(found.graph, after=Lists(0 * found.graph.after.offset, found.graph.after.item[:0]))
    kept = olla.plan(loose, order=found.order, layout=False)
    fields = {name: getattr(kept, name) for name in ("graph_digest", "peak_bytes", "lower_bound_bytes")}
    with pytest.raises(PlanError) as caught:
        olla.check(graph, replace(found, rewrites=(replace(found.recomputed, graph=loose),), **fields))
    assert caught.value.rule == "rewrite_repeated"


def test_the_least_peak_is_never_above_one_within_a_slowdown() -> None:
    graph = training_chain(12)
    least = plan(graph, minimise="peak").peak_bytes
    assert all(least <= plan(graph, max_slowdown=share).peak_bytes for share in (0.05, 0.1, 0.15, 0.3, 1.0))


def test_a_plan_is_the_same_however_much_time_there_is() -> None:
    graph = training_chain()
    plans = [olla.plan(graph, max_slowdown=0.2, time_limit=limit) for limit in (20.0, 60.0)]
    assert plans[0].peak_bytes == plans[1].peak_bytes
    assert np.array_equal(plans[0].order, plans[1].order)


def test_a_slowdown_is_kept_and_more_of_it_never_needs_more_memory() -> None:
    graph = training_chain()
    peaks = []
    for share in (0.0, 0.05, 0.2, 1.0):
        found = plan(graph, max_slowdown=share)
        assert found.slowdown <= share + 1e-9
        peaks.append(found.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.7 * olla.plan(graph).peak_bytes


def test_levers_that_are_off_are_not_used() -> None:
    graph = training_chain()
    found = plan(graph, minimise="peak", in_place=False)
    assert found.num_in_place == 0
    found = plan(graph, minimise="peak", recompute=False)
    assert (found.num_recomputed, found.added_seconds) == (0, 0.0)
    assert not found.recomputed.rerun.any()


def test_an_impossible_budget_names_its_bound_and_what_forces_it() -> None:
    graph = training_chain()
    with pytest.raises(BudgetError, match=r"every one needs at least \d+ bytes.*forces this") as caught:
        plan(graph, budget=1_500_000)
    assert caught.value.ids
    assert caught.value.rule == "budget"


def test_the_lowest_that_a_refusal_names_can_be_had() -> None:
    graph = training_chain()
    peak = plan(graph, minimise="peak", alignment=4096).peak_bytes  # its arena is larger: every tensor is rounded up
    with pytest.raises(BudgetError, match=r"The lowest found is (\d+)") as caught:
        plan(graph, budget=peak, alignment=4096)
    lowest = int(str(caught.value).split("The lowest found is ")[1].split(":")[0])
    assert lowest > peak
    assert needed_bytes(plan(graph, budget=lowest, alignment=4096)) <= lowest


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    graph = training_chain()
    found = plan(graph, max_slowdown=0.1)
    found.save(tmp_path / "plan.json.gz")
    loaded = olla.Plan.load(tmp_path / "plan.json.gz")
    assert loaded.to_object() == found.to_object()
    olla.check(graph, loaded)
    assert loaded.added_seconds == found.added_seconds
    assert loaded.graph.digest == found.graph.digest


def test_a_rewriting_that_computes_something_else_is_refused() -> None:
    graph = training_chain()
    found = plan(graph, minimise="peak")
    origin = found.origin.copy()
    i, j = (int(np.flatnonzero(origin == graph.op_names.index(name))[0]) for name in ("mm_1", "mm_2"))
    origin[[i, j]] = origin[[j, i]]
    with pytest.raises(PlanError) as caught:
        olla.check(graph, replace(found, rewrites=(replace(found.recomputed, origin=origin),)))
    assert caught.value.rule == "rewrite_inputs"
    rerun = found.recomputed.rerun.copy()
    rerun[int(np.flatnonzero(found.origin == graph.op_names.index("dropout_0"))[0])] = Rerun.WHOLE
    with pytest.raises(PlanError) as caught:
        olla.check(graph, replace(found, rewrites=(replace(found.recomputed, rerun=rerun),)))
    assert caught.value.rule == "rewrite_repeated"


def test_a_curve_falls_and_ends_where_the_least_peak_is() -> None:
    curve = olla.pareto(training_chain())
    assert np.all(np.diff(curve.peak_bytes) < 0)
    assert np.all(np.diff(curve.added_seconds) > 0)
    assert curve.added_seconds[0] == 0.0


def test_a_curve_is_drawn_step_by_step() -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="pictures need matplotlib")
    curve = olla.pareto(training_chain())
    axes = curve.plot(figures.Figure().subplots())
    percent, peak = axes.lines[0].get_data()
    assert np.allclose(peak * 2**30, curve.peak_bytes)
    assert np.allclose(percent, 100 * curve.added_seconds / curve.base_seconds)
    assert axes.get_title() == curve.graph_name


def test_updates_go_early_only_behind_what_they_need() -> None:
    graph = training_chain()
    order = early_updates(graph, np.arange(graph.num_ops, dtype=np.int32))
    assert graph.core.is_order(order)
    assert graph.op_names[order[-1]] == "update"
    step = {int(v): s for s, v in enumerate(order)}
    first = graph.op_names.index("update")
    assert step[first] < step[graph.op_names.index("dropout_backward_0")]


def test_two_goals_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="budget and max_slowdown are given"):
        olla.plan(training_chain(), budget="1GB", max_slowdown=0.1)


def test_norms_run_again_from_their_statistics_and_update_no_buffer() -> None:
    b = Graph.builder("norm")
    x, weight, running = b.tensor(1000), b.tensor(8, kind="parameter"), b.tensor(8, kind="buffer")
    out, mean, deviation = b.tensor(1000), b.tensor(8), b.tensor(8)
    b.op("x", writes=[x])
    target = "aten.native_batch_norm.default"
    b.op(
        "norm",
        reads=[x, weight, running],
        writes=[out, mean, deviation],
        mutates=[running],
        target=target,
        moved_bytes=3000,
    )
    r = rules(b.build(), A100)
    assert r.rerun[1] == Rerun.FIRST_RESULT
    assert r.rerun_reads.of(1).tolist() == [x, weight, mean, deviation]
    assert r.rerun_moved_bytes[1] == 2000


@pytest.mark.parametrize("swapping", [{}, {"swap": True, "link": 1e9}, {"method": "autoswap"}])
def test_extra_precedences_are_kept_beside_a_budget(swapping: dict[str, object]) -> None:
    g = training_chain()
    names = g.op_names
    pair = (names.index("input_7"), names.index("weight_6"))
    first, second = names.index("weight_7"), names.index("input_7")
    plan = olla.plan(g, max_slowdown=0.2, precedences=[pair, (first, second)], time_limit=2.0, **swapping)
    olla.check(g, plan)
    runs = plan.origin[plan.order].tolist()
    assert runs.index(first) < runs.index(second)
    assert plan.options["num_precedences"] == 2
    with pytest.raises(ValueError, match=r"precedence \(5, 3\): .* must be one before the second"):
        olla.plan(g, max_slowdown=0.2, precedences=[(5, 3)], time_limit=1.0)
