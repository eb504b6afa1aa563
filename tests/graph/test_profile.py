from typing import Any

import numpy as np
import pytest
from hypothesis import given

from olla import Graph, PlanError, _core
from tests.support import oracle, strategies


@given(strategies.graphs_with_order())
def test_profile_equals_the_simulation_of_any_order(graph_and_order: tuple[Graph, list[int]]) -> None:
    graph, order = graph_and_order
    profile = _core.profile(graph.core, np.array(order, dtype=np.int32))
    expected = oracle.live_bytes(graph, order)
    assert profile.live_bytes.tolist() == expected
    assert profile.peak_bytes == oracle.peak(graph, order)
    assert profile.peak_step == (expected.index(max(expected)) if expected else 0)

    steps: dict[int, list[int]] = {}
    for step, tensors in enumerate(oracle.live_sets(graph, order)):
        for t in tensors:
            steps.setdefault(t, []).append(step)
    for t in range(graph.num_tensors):
        assert list(range(profile.first[t], profile.last[t])) == steps.get(t, [])


@given(strategies.graphs_with_order())
def test_core_and_oracle_agree_on_what_an_order_is(graph_and_order: tuple[Graph, list[int]]) -> None:
    graph, order = graph_and_order
    for candidate in (order, order[::-1], order[:-1], order[1:] + order[:1]):
        assert graph.core.is_order(np.array(candidate, dtype=np.int32)) == oracle.is_order(graph, candidate)


def test_an_order_that_breaks_a_dependency_has_no_profile() -> None:
    graph = Graph.from_arrays(tensor_bytes=[1], reads=[[], [0]], writes=[[0], []])
    with pytest.raises(PlanError, match="order") as error:
        _core.profile(graph.core, np.array([1, 0], dtype=np.int32))
    assert error.value.rule == "order"


def test_an_order_of_another_type_is_refused_instead_of_copied() -> None:
    graph = Graph.from_arrays(tensor_bytes=[], reads=[[], []], writes=[[], []])
    orders: list[Any] = [np.array([0, 1]), np.array([0, 9, 1], dtype=np.int32)[::2], [0, 1]]
    for order in orders:
        with pytest.raises(TypeError):
            _core.profile(graph.core, order)


def test_a_profile_is_read_only_and_its_arrays_outlive_it() -> None:
    graph = Graph.from_arrays(tensor_bytes=[3], reads=[[], [0]], writes=[[0], []])
    profile = _core.profile(graph.core, np.array([0, 1], dtype=np.int32))
    with pytest.raises(AttributeError):
        profile.peak_bytes = 0  # type: ignore[misc]
    assert np.shares_memory(profile.live_bytes, profile.live_bytes)
    live, last = profile.live_bytes, profile.last
    del profile
    np.full(1000, -1)  # what would take the memory that is free
    assert (live.tolist(), last.tolist()) == ([3, 3], [2])
