"""A heuristic or rival that fails takes no answer down: it is left out, with a note; a method asked for says so."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import olla
from olla import Graph, SolverError, pipeline
from olla.base.rivals import LEFT_OUT
from olla.layout import Placement, rounded_up
from olla.methods import model
from olla.order import Answer, Problem, base_orders, warm_starts
from olla.recompute import improving, search
from olla.swap import autoswap, combine
from tests.support.fans import clipped, idle
from tests.support.patches import patch_core


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def twice(graph: Any, *_: Any) -> Any:
    return np.zeros(graph.num_ops, dtype=np.int32)


def short(*_: Any) -> Any:
    return np.zeros(1, dtype=np.int32)


def none(*_: Any) -> Any:
    return None


def halves(graph: Any, *_: Any) -> Any:
    return np.arange(graph.num_ops) + 0.5


BROKEN: list[Callable[..., Any]] = [raises, twice, short, none, halves]
SCHEDULES = ("least_peak_order", "breadth_first_order", "depth_first_order")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return clipped(300)


@pytest.fixture(scope="module")
def rewritable() -> Graph:
    return idle(20)


def left_out(plan: olla.Plan) -> list[str]:
    return [line for line in plan.details if line.startswith(LEFT_OUT)]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("method", ["auto", "inductor"])
def test_a_broken_list_schedule_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graph: Graph, method: str, name: str, broken: Any
) -> None:
    patch_core(monkeypatch, name, broken)
    with caplog.at_level(logging.WARNING, logger="olla"):
        plan = olla.plan(graph, method=method, time_limit=0.1)
    olla.check(graph, plan)
    assert len(left_out(plan)) == 1, plan.details
    assert "was left out" in caplog.text


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("method", ["auto", "ilp"])
def test_a_broken_warm_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, method: str, broken: Any
) -> None:
    monkeypatch.setattr(warm_starts, "LOAD_SECONDS", 0.0)
    monkeypatch.setattr(warm_starts, "_kernel", lambda: lambda *_: broken(graph))
    plan = olla.plan(graph, method=method, time_limit=0.1)
    olla.check(graph, plan)
    assert len(left_out(plan)) == 1, plan.details


def test_without_any_heuristic_the_program_order_is_refined(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    monkeypatch.setattr(warm_starts, "_kernel", raises)
    monkeypatch.setattr(warm_starts, "LOAD_SECONDS", 0.0)  # it is tried, however short the limit
    for name in SCHEDULES:
        patch_core(monkeypatch, name, raises)
    plan = olla.plan(graph, time_limit=1.0)
    olla.check(graph, plan)
    assert len(left_out(plan)) == 4
    with pytest.raises(SolverError, match="method 'inductor' failed: none of Inductor's schedules"):
        olla.plan(graph, method="inductor")


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", [*SCHEDULES, "early_updates"])
def test_a_broken_base_order_is_left_out(
    monkeypatch: pytest.MonkeyPatch, rewritable: Graph, name: str, broken: Any
) -> None:
    if name == "early_updates":
        for module in (base_orders, search):
            monkeypatch.setattr(module, name, broken)
    else:
        patch_core(monkeypatch, name, broken)
    plan = olla.plan(rewritable, max_slowdown=0.05, time_limit=1.0)
    olla.check(rewritable, plan)
    assert left_out(plan)


def test_a_rival_of_a_rewriting_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, rewritable: Graph) -> None:
    monkeypatch.setattr(improving, "induced", raises)
    monkeypatch.setattr(search.RecomputeSearch, "_close_enough", lambda *_: False)
    plan = olla.plan(rewritable, max_slowdown=0.05, time_limit=1.0)
    olla.check(rewritable, plan)
    assert any("the order of the rewritten graph" in line for line in left_out(plan))


WAYS = [search.RecomputeSearch, combine.CombinedSearch]


@pytest.mark.parametrize("way", [0, 1])
def test_of_plans_with_and_without_swaps_one_may_fail(
    monkeypatch: pytest.MonkeyPatch, rewritable: Graph, way: int
) -> None:
    budget_bytes = 2 * olla.plan(rewritable, minimise="peak", time_limit=1.0).peak_bytes
    monkeypatch.setattr(WAYS[way], "within", raises)
    plan = olla.plan(rewritable, budget=budget_bytes, host_budget="1GiB", time_limit=1.0)
    olla.check(rewritable, plan)
    monkeypatch.setattr(WAYS[1 - way], "within", raises)
    with pytest.raises(RuntimeError, match="planted"):
        olla.plan(rewritable, budget=budget_bytes, host_budget="1GiB", time_limit=1.0)


def test_a_broken_score_of_autoswap_starts_no_search(monkeypatch: pytest.MonkeyPatch, rewritable: Graph) -> None:
    monkeypatch.setattr(autoswap.AutoSwap, "least_peak", raises)
    olla.check(rewritable, olla.plan(rewritable, minimise="peak", swap=True, time_limit=1.0))


@pytest.mark.parametrize("broken", BROKEN)
def test_auto_keeps_its_first_order_where_the_search_itself_fails(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, broken: Any
) -> None:
    def solve(problem: Problem) -> Answer:
        return Answer(broken(problem.graph))

    monkeypatch.setattr(pipeline, "solver", lambda _: solve)
    plan = olla.plan(graph)
    olla.check(graph, plan)
    assert plan.peak_bytes == plan.program_peak_bytes
    assert "The search failed" in plan.message
    with pytest.raises(SolverError, match="method 'roam' failed: it"):
        olla.plan(graph, method="roam")


def test_a_method_whose_layout_is_broken_says_so(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    def solve(problem: Problem) -> Answer:
        at_zero = np.where(graph.writer < 0, -1, 0)
        arena_bytes = rounded_up(int(graph.tensor_bytes[graph.writes.item].max()), 512)
        nowhere = np.full(graph.num_ops, -1, dtype=np.int64)
        return Answer(problem.order, placement=Placement(at_zero, nowhere, arena_bytes))

    monkeypatch.setattr(pipeline, "solver", lambda _: solve)
    with pytest.raises(SolverError, match="method 'roam' failed: its layout breaks rule 'overlap'"):
        olla.plan(graph, method="roam")


def test_a_method_that_is_asked_for_and_fails_says_so(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    monkeypatch.setattr(model, "control_edges", raises)
    with pytest.raises(SolverError, match="method 'model' failed: it failed with RuntimeError: planted"):
        olla.plan(graph, method="model")


@pytest.mark.parametrize("goal", [{}, {"max_slowdown": 0.1}, {"minimise": "peak", "swap": True}])
def test_what_the_progress_callback_raises_is_raised(graph: Graph, goal: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        olla.plan(graph, progress=raises, time_limit=3.0, **goal)
