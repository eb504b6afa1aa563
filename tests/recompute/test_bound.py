"""The order-free bounds against all orders and recomputations of tiny graphs, and the searches against both."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla import Graph, _core
from olla.order.base_orders import late_changes
from olla.recompute.bounds import heaviest
from tests.support.budget_oracle import Permissions, evictor, least_added_seconds, least_peak_bytes, tiny


@settings(max_examples=150, deadline=None)
@given(tiny(), st.integers(0, 8))
def test_no_plan_is_below_the_bound_on_the_peak(case: tuple[Graph, Permissions], added: int) -> None:
    graph, allowed = case
    ops = np.arange(graph.num_ops, dtype=np.int32)
    bounds, _ = evictor(graph, allowed).least_peak(ops, float(added), 10.0, None)
    assert bounds.max() <= least_peak_bytes(graph, allowed, added)


@settings(max_examples=150, deadline=None)
@given(tiny(), st.floats(0.0, 1.0))
def test_no_plan_is_below_the_bound_on_added_time(case: tuple[Graph, Permissions], share: float) -> None:
    graph, allowed = case
    ops = np.arange(graph.num_ops, dtype=np.int32)
    search = evictor(graph, allowed)
    least = least_peak_bytes(graph, allowed, math.inf)
    peak = round(least + share * (search.peak - least))
    bounds, _ = search.least_added_seconds(ops, peak, 10.0, None)
    assert bounds.max() <= least_added_seconds(graph, allowed, peak)
    if least > 0:
        bounds, _ = search.least_added_seconds(ops, 0, 10.0, None)
        assert bounds.max() == math.inf


@settings(max_examples=100, deadline=None)
@given(tiny())
def test_what_the_searches_find_is_no_better_than_everything_tried(case: tuple[Graph, Permissions]) -> None:
    graph, allowed = case
    search = evictor(graph, allowed)
    limits = _core.Limits(time_limit=10.0, max_work=None, progress=None)
    search.run(0, math.inf, limits)
    assert search.added_seconds >= least_added_seconds(graph, allowed, search.peak)
    peak, seconds = search.peak, search.added_seconds
    target = _core.RecomputeTarget(least_time=True, peak=peak, added_seconds=math.inf)
    search.improve(target, [], 20, 0, limits)
    assert search.peak <= peak
    assert least_added_seconds(graph, allowed, search.peak) <= search.added_seconds <= seconds


@pytest.mark.parametrize("num_graphs", [100, pytest.param(2500, marks=pytest.mark.slow)])
def test_no_plan_that_updates_parameters_in_place_is_below_its_bounds(num_graphs: int) -> None:
    @settings(max_examples=num_graphs, deadline=None)
    @given(tiny(updates=True), st.integers(0, 8))
    def hold(case: tuple[Graph, Permissions], added: int) -> None:
        graph, allowed = case
        ops = np.arange(graph.num_ops, dtype=np.int32)
        search = evictor(graph, allowed)
        least = least_peak_bytes(graph, allowed, added)
        bounds, _ = search.least_peak(ops, float(added), 10.0, None)
        assert bounds.max() <= least
        seconds, _ = search.least_added_seconds(ops, least, 10.0, None)
        assert seconds.max() <= least_added_seconds(graph, allowed, least)

    hold()


@settings(max_examples=200, deadline=None)
@given(tiny(updates=True))
def test_what_late_updates_allow_is_no_better_than_everything_tried(case: tuple[Graph, Permissions]) -> None:
    graph, allowed = case
    order = late_changes(graph, np.arange(graph.num_ops, dtype=np.int32))
    assert graph.core.is_order(order)
    search = evictor(graph, allowed, order)
    search.run(0, math.inf, _core.Limits(time_limit=10.0, max_work=None, progress=None))
    assert search.added_seconds >= least_added_seconds(graph, allowed, search.peak)


def test_donated_state_replaced_by_independent_updates_counts_in_full() -> None:
    builder = Graph.builder("functional updates")
    old, new = ([builder.tensor(10, donated=donated) for _ in range(3)] for donated in (True, False))
    for i in range(3):
        builder.op(f"update_{i}", reads=[old[i]], writes=[new[i]])
        builder.output(new[i])
    graph = builder.build()
    allowed = Permissions([1, 1, 1], [True] * 3, [True] * 3)
    bounds, _ = evictor(graph, allowed).least_peak(np.arange(3, dtype=np.int32), math.inf, 10.0, None)
    assert bounds.max() == least_peak_bytes(graph, allowed, 100) == 40


def test_bound_and_searches_meet_the_best_on_a_training_chain() -> None:
    """Three forward ops, three backward ones that read their activations: the classical case."""
    builder = Graph.builder("chain")
    activations = [builder.tensor(4) for _ in range(3)]
    gradients = [builder.tensor(1) for _ in range(3)]
    for v, t in enumerate(activations):
        builder.op(f"forward_{v}", reads=activations[v - 1 : v] if v else [], writes=[t])
    for v in reversed(range(3)):
        builder.op(f"backward_{v}", reads=[activations[v], *gradients[v + 1 : v + 2]], writes=[gradients[v]])
    graph = builder.build()
    allowed = Permissions([2, 3, 4, 1, 1, 1], [True] * 6, [False] * 6)
    ops = np.arange(graph.num_ops, dtype=np.int32)
    search = evictor(graph, allowed)
    assert search.peak == 13
    for added, least in ((0.0, 13), (2.0, 9)):
        assert least_peak_bytes(graph, allowed, added) == least
        search.run(least, added, _core.Limits(time_limit=10.0, max_work=None, progress=None))
        assert (search.peak, search.added_seconds) == (least, added)
    bounds, _ = search.least_peak(ops, 0.0, 10.0, None)
    assert bounds.max() == 13
    bounds, _ = search.least_peak(ops, 2.0, 10.0, None)
    assert bounds.max() == 8  # the half of the second activation, for a time that buys no whole one
    bounds, _ = search.least_added_seconds(ops, 9, 10.0, None)
    assert 1.9 < bounds.max() <= 2.0


def test_the_heaviest_ops_come_first() -> None:
    b = Graph.builder("three sizes")
    x = b.tensor(10, kind="input")
    y, z = b.tensor(200), b.tensor(30)
    b.op("reads little", reads=[x], writes=[y])
    b.op("reads much", reads=[y, x], writes=[z])
    b.op("works with much", reads=[z], writes=[b.tensor(1)], workspace_bytes=400)
    assert heaviest(b.build()).tolist() == [2, 1, 0]
