"""The order-free bounds against all orders and recomputations of tiny graphs, and the searches against both."""

from __future__ import annotations

import math

import numpy as np
from budget_oracle import Permissions, least_added_seconds, least_peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from olla import Graph, _core
from olla.graph import Rules
from olla.graph.operators import lists_of


@st.composite
def tiny(draw: st.DrawFn, max_ops: int = 6) -> tuple[Graph, Permissions]:
    """A graph without mutations, one result per op, and what its ops may do; equal sizes are common."""
    builder = Graph.builder("tiny")
    tensors = [builder.tensor(draw(st.integers(0, 3)), kind="parameter", donated=draw(st.booleans())) for _ in range(2)]
    num_ops = draw(st.integers(1, max_ops))
    for v in range(num_ops):
        recent = tensors[-4:]
        reads = draw(st.lists(st.sampled_from(recent), max_size=3, unique=True))
        written = builder.tensor(draw(st.sampled_from([1, 2, 2, 4, 4, 7])))
        builder.op(f"op_{v}", reads=reads, writes=[written], workspace_bytes=draw(st.sampled_from([0, 0, 0, 2])))
        tensors.append(written)
    for t in draw(st.lists(st.sampled_from(tensors[2:]), max_size=2, unique=True)):
        builder.output(t)
    flags = st.lists(st.booleans(), min_size=num_ops, max_size=num_ops)
    seconds = draw(st.lists(st.integers(1, 5), min_size=num_ops, max_size=num_ops))
    return builder.build(), Permissions(seconds, draw(flags), draw(flags))


def evictor(graph: Graph, allowed: Permissions) -> _core.RecomputeSearch:
    """The searches of the core on the program order."""
    seconds = np.array(allowed.seconds, dtype=np.float64)
    rules = Rules(
        seconds=seconds,
        rerun=np.array(allowed.again, dtype=np.uint8),
        rerun_seconds=seconds,
        rerun_moved_bytes=np.zeros(graph.num_ops, dtype=np.int64),
        rerun_reads=lists_of([[]] * graph.num_ops),
        in_place=np.array(allowed.in_place, dtype=np.uint8),
    )
    return rules.evictor(graph, np.arange(graph.num_ops, dtype=np.int32))


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
    search.run(0, math.inf, 10.0, None, None)
    assert search.added_seconds >= least_added_seconds(graph, allowed, search.peak)
    peak, seconds = search.peak, search.added_seconds
    search.improve(True, peak, math.inf, 0, 20, 10.0, None, None, [])
    assert search.peak <= peak
    assert least_added_seconds(graph, allowed, search.peak) <= search.added_seconds <= seconds


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
        search.run(least, added, 10.0, None, None)
        assert (search.peak, search.added_seconds) == (least, added)
    bounds, _ = search.least_peak(ops, 0.0, 10.0, None)
    assert bounds.max() == 13
    bounds, _ = search.least_peak(ops, 2.0, 10.0, None)
    assert bounds.max() == 8  # the half of the second activation, for a time that buys no whole one
    bounds, _ = search.least_added_seconds(ops, 9, 10.0, None)
    assert 1.9 < bounds.max() <= 2.0
