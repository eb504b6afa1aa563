"""Ops with very many direct successors, predecessors and readers: every method and every goal gives a valid plan."""

import functools
import time
from typing import Any

import numpy as np
import pytest

import olla
from olla import Graph, _core
from olla.order.base_orders import base_orders
from olla.order.warm_starts import hoist
from olla.plan import METHODS
from tests.support.fans import FANS, idle, readers, results

QUICK = ("auto", "inductor", "program", "smartpool")
GOALS: dict[str, dict[str, Any]] = {
    "max_slowdown": {"max_slowdown": 0.1},
    "minimise": {"minimise": "peak"},
    "swap": {"minimise": "peak", "swap": True},
    "host_budget": {"max_slowdown": 0.1, "host_budget": "64MiB"},
}

made = functools.cache(lambda fan, num: fan(num))


def checked(graph: Graph, **options: Any) -> olla.Plan:
    plan = olla.plan(graph, **options)
    olla.check(graph, plan)
    return plan


@pytest.mark.parametrize("num", [255, 256, 257, 300, 70_000])
def test_every_schedule_of_an_op_with_many_successors_names_each_op_once(num: int) -> None:
    graph = made(readers, num)
    for schedule in (_core.depth_first_order, _core.breadth_first_order, _core.least_peak_order):
        assert graph.core.is_order(schedule(graph.core)), schedule
    assert graph.core.is_order(hoist(graph))
    for order in base_orders(graph, np.arange(graph.num_ops, dtype=np.int32)):
        assert graph.core.is_order(order)


@pytest.mark.parametrize("method", [*METHODS, "autoswap"])
@pytest.mark.parametrize("fan", FANS)
@pytest.mark.parametrize("time_limit", [0.0, 0.3])
def test_300_successors_are_planned_by_every_method(fan: Any, method: str, time_limit: float) -> None:
    checked(made(fan, 300), method=method, time_limit=time_limit)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("fan", FANS)
@pytest.mark.parametrize("time_limit", [0.0, 0.3])
def test_300_successors_are_planned_towards_every_goal(fan: Any, goal: str, time_limit: float) -> None:
    checked(made(fan, 300), time_limit=time_limit, **GOALS[goal])


@pytest.mark.parametrize("method", ["auto", "ilp"])
@pytest.mark.parametrize("fan", FANS)
def test_300_successors_are_planned_within_a_budget(fan: Any, method: str) -> None:
    graph = made(fan, 300)
    needed = olla.plan(graph, method="program")
    budget = needed.arena_bytes + graph.resident_bytes
    plan = checked(graph, method=method, time_limit=0.5, budget=budget)
    assert plan.arena_bytes + graph.resident_bytes <= budget
    checked(graph, time_limit=0.5, budget=budget, host_budget="64MiB")


@pytest.mark.parametrize("method", QUICK)
def test_70_000_successors_are_planned_by_quick_methods(method: str) -> None:
    checked(made(readers, 70_000), method=method, time_limit=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "autoswap"])
@pytest.mark.parametrize("fan", FANS)
def test_70_000_successors_are_planned_by_every_method_about_in_time(fan: Any, method: str) -> None:
    graph = made(fan, 20_000 if fan is idle else 70_000 if fan is not FANS[3] else 14_000)
    start = time.perf_counter()
    checked(graph, method=method, time_limit=1.0)
    assert time.perf_counter() - start < 120


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("fan", [readers, results])
def test_70_000_successors_are_planned_towards_every_goal(fan: Any, goal: str) -> None:
    checked(made(fan, 70_000), time_limit=1.0, **GOALS[goal])
