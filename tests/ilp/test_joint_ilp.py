"""The joint program against brute force over all orders and all layouts."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import Graph, _core
from olla._core import JointIlpResult
from olla.errors import PlanError, SolverError
from olla.ilp import joint_ilp
from tests.support import oracle
from tests.support.generate import small_random_graph
from tests.support.samples import SHARED
from tests.support.strategies import graphs_with_order

NUM_RANDOM = int(os.environ.get("OLLA_RANDOM", "100"))


def solve(graph: Graph, order: list[int] | None = None, alignment: int = 1, **options: Any) -> JointIlpResult:
    """Run the program and check all that holds of every answer."""
    start = np.arange(graph.num_ops) if order is None else np.array(order)
    result = joint_ilp(_core.arena_graph(graph.core, alignment), start.astype(np.int32), **options)
    found = result.order.tolist()
    assert oracle.is_order(graph, found)
    require_layout(graph, result, alignment)
    assert result.lower_bound_bytes <= result.arena_bytes
    assert (result.status == "optimal") == (result.lower_bound_bytes == result.arena_bytes)
    return result


def require_layout(graph: Graph, result: JointIlpResult, alignment: int) -> None:
    """Fail unless what is alive together lies apart, inside the arena, at multiples of the alignment."""
    written = set(graph.writes.item.tolist())
    assert [t for t in range(graph.num_tensors) if result.offsets[t] >= 0] == sorted(written)
    for step, live in enumerate(oracle.live_sets(graph, result.order.tolist())):
        op = result.order[step]
        places = [(int(result.offsets[t]), int(graph.tensor_bytes[t])) for t in live & written]
        places.append((int(result.workspace_offsets[op]), int(graph.workspace_bytes[op])))
        end = 0
        for offset, size in sorted(place for place in places if place[1]):
            assert end <= offset
            assert offset % alignment == 0
            end = offset + size
        assert end <= result.arena_bytes


def split_that_cannot_be_packed() -> Graph:
    """Five ops in a row whose tensors, at their least peak of 26 bytes, fit no arena of 26; one op that may wait."""
    builder = Graph.builder("tight")
    a, b, c, d, e, f, g, h, i = (builder.tensor(size) for size in (17, 9, 4, 12, 4, 3, 8, 16, 2))
    builder.op("op0", writes=[a, b])
    builder.op("op1", reads=[b], writes=[c, d], after=[0])
    builder.op("op2", reads=[c], writes=[e, f], after=[1])
    builder.op("op3", reads=[c], writes=[i])
    builder.op("op4", reads=[d, f], writes=[g], after=[2])
    builder.op("op5", reads=[g, i], writes=[h], after=[4])
    return builder.build()


def test_joint_arena_is_below_that_of_the_best_order() -> None:
    graph = split_that_cannot_be_packed()
    peaks = {order: oracle.peak(graph, order) for order in oracle.orders(graph)}
    least = min(peaks.values())
    split_arena = min(
        oracle.best_height(*zip(*oracle.arena_buffers(graph, order), strict=True))
        for order, peak in peaks.items()
        if peak == least
    )
    assert (least, split_arena, oracle.best_arena(graph)) == (26, 28, 27)

    split = olla.plan(graph, method="ilp", alignment=1)
    joint = olla.plan(graph, method="joint", alignment=1)
    assert (split.peak_bytes, split.arena_bytes) == (26, 28)
    assert (joint.peak_bytes, joint.arena_bytes, joint.arena_lower_bound_bytes) == (27, 27, 27)
    assert "1 bytes below the split's" in joint.message


def test_smallest_arena_equals_brute_force_on_random_graphs() -> None:
    num_solved = 0
    for seed in range(NUM_RANDOM):
        graph = small_random_graph(seed, max_ops=7)
        alignment = (1, 8)[seed % 2]
        result = solve(graph, alignment=alignment)
        assert result.status == "optimal", f"graph {seed}: {result.figures.message}"
        assert result.arena_bytes == oracle.best_arena(graph, alignment), f"graph {seed}"
        num_solved += result.figures.num_columns > 0
    assert num_solved >= NUM_RANDOM // 20, "too few graphs reached HiGHS to show anything"


@settings(max_examples=25, deadline=None)
@given(case=graphs_with_order(max_ops=5), alignment=st.sampled_from([1, 16]))
def test_any_start_leads_to_the_smallest_arena(case: tuple[Graph, list[int]], alignment: int) -> None:
    graph, order = case
    result = solve(graph, order, alignment)
    assert result.status == "optimal"
    assert result.arena_bytes == oracle.best_arena(graph, alignment)


@settings(max_examples=25, deadline=None)
@given(graphs_with_order(max_ops=7))
def test_peaks_of_the_arena_graph_are_loads(case: tuple[Graph, list[int]]) -> None:
    graph, order = case
    arena = _core.arena_graph(graph.core, 8)
    buffers = oracle.arena_buffers(graph, order, 8)
    load = max((sum(s for a, b, s in buffers if a <= step < b) for step, _, _ in buffers), default=0)
    assert _core.profile(arena, np.array(order, dtype=np.int32)).peak_bytes == load


def test_without_time_the_start_comes_back_as_feasible() -> None:
    result = solve(split_that_cannot_be_packed(), time_limit=0.0)
    assert result.status == "feasible"
    assert "time limit" in result.figures.message


def test_a_stop_request_is_reported() -> None:
    result = solve(small_random_graph(3, 7), progress=lambda *_: False, time_limit=60.0)
    assert result.cancelled or result.status == "optimal"


def test_a_false_lower_bound_is_refused() -> None:
    with pytest.raises(SolverError, match="lower bound of 1000 bytes is false"):
        solve(split_that_cannot_be_packed(), lower_bound_bytes=1000)


def test_a_start_that_is_no_layout_is_refused() -> None:
    graph = split_that_cannot_be_packed()
    offsets = np.zeros(graph.num_tensors, dtype=np.int64)
    with pytest.raises(PlanError, match="no layout"):
        solve(graph, offsets=offsets, workspace_offsets=np.full(graph.num_ops, -1, dtype=np.int64))


def test_a_given_layout_is_never_made_worse() -> None:
    graph = split_that_cannot_be_packed()
    first = solve(graph)
    again = solve(
        graph,
        first.order.tolist(),
        offsets=first.offsets,
        workspace_offsets=first.workspace_offsets,
        lower_bound_bytes=27,
    )
    assert (again.arena_bytes, again.status, again.figures.num_columns) == (27, "optimal", 0)


@pytest.mark.parametrize("name", ["alexnet_b32", "vgg11_b32"])
def test_the_smallest_arena_of_a_training_step_is_proved(name: str) -> None:
    path = SHARED / "graphs" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is missing: set OLLA_SHARED")
    plan = olla.plan(path, method="joint", time_limit=60.0)
    assert plan.arena_bytes == plan.arena_lower_bound_bytes > 0
