"""The methods that solve integer programs: ilp (OLLA's split), joint (equation (9)) and model (MODeL's devices)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import Graph
from olla.check.check import check
from olla.methods.model import control_edges, pyramid
from tests.support import oracle
from tests.support.strategies import buffers, graphs


@settings(max_examples=30, deadline=None)
@given(graph=graphs(max_ops=5), method=st.sampled_from(["ilp", "joint", "model"]), alignment=st.sampled_from([1, 512]))
def test_plans_are_valid_and_their_bounds_hold(graph: Graph, method: str, alignment: int) -> None:
    plan = olla.plan(graph, method=method, alignment=alignment, time_limit=10.0)
    check(graph, plan)
    assert plan.lower_bound_bytes <= oracle.best_peak(graph) <= plan.peak_bytes
    assert plan.arena_lower_bound_bytes <= oracle.best_arena(graph, alignment) <= plan.arena_bytes
    if method == "joint":
        assert plan.arena_lower_bound_bytes == oracle.best_arena(graph, alignment) == plan.arena_bytes
    else:
        assert plan.peak_bytes <= plan.program_peak_bytes
    if method == "ilp":
        assert plan.peak_bytes == oracle.best_peak(graph)


def tight_chain() -> Graph:
    """Five ops in a row whose tensors fill 6 bytes at every step and fit no arena of 6."""
    lower, upper, size = [0, 0, 1, 1, 2, 2, 3, 4], [1, 2, 3, 4, 3, 4, 5, 5], [3, 3, 2, 1, 1, 2, 3, 3]
    builder = Graph.builder("tight chain")
    tensors = [builder.tensor(num_bytes) for num_bytes in size]
    for v in range(5):
        builder.op(
            f"op{v}",
            reads=[t for t in tensors if upper[t] - 1 == v and lower[t] < v],
            writes=[t for t in tensors if lower[t] == v],
            after=[v - 1] if v else [],
        )
    return builder.build()


def test_the_split_proves_by_the_address_program_what_its_order_needs() -> None:
    plan = olla.plan(tight_chain(), method="ilp", alignment=1)
    assert (plan.load_bytes, plan.arena_bytes) == (6, 7)


def test_the_joint_program_proves_that_no_order_and_layout_need_less() -> None:
    plan = olla.plan(tight_chain(), method="joint", alignment=1)
    assert (plan.load_bytes, plan.arena_bytes, plan.arena_lower_bound_bytes) == (6, 7, 7)
    assert any("joint program: optimal" in line for line in plan.details)


@pytest.mark.parametrize("method", ["ilp", "joint", "model"])
def test_without_a_layout_only_the_order_is_planned(method: str) -> None:
    plan = olla.plan(tight_chain(), method=method, layout=False)
    assert plan.offsets.tolist() == [-1] * 8
    assert plan.peak_bytes == 6


@pytest.mark.parametrize("method", ["ilp", "joint", "model"])
def test_extra_precedences_are_kept(method: str) -> None:
    builder = Graph.builder("free")
    for v in range(4):
        builder.op(f"op{v}", writes=[builder.tensor(2 + v)])
    plan = olla.plan(builder.build(), method=method, precedences=[(3, 0), (2, 1)])
    order = plan.order.tolist()
    assert order.index(3) < order.index(0)
    assert order.index(2) < order.index(1)


@pytest.mark.parametrize("method", ["ilp", "joint", "model"])
def test_a_graph_without_ops_is_planned(method: str) -> None:
    builder = Graph.builder("empty")
    builder.tensor(5)
    plan = olla.plan(builder.build(), method=method)
    assert (plan.peak_bytes, plan.arena_bytes) == (5, 0)


def test_control_edges_force_updates_before_the_next_level() -> None:
    builder = Graph.builder("backward pass")
    weights = [builder.tensor(8, kind="parameter") for _ in range(3)]
    flow = [builder.tensor(4) for _ in range(4)]
    gradients = [builder.tensor(8) for _ in range(3)]
    builder.op("loss", writes=[flow[0]])
    for i in range(3):  # ops 1 to 3, on levels 1 to 3
        builder.op(f"backward_{i}", reads=[weights[i], flow[i]], writes=[flow[i + 1], gradients[i]], kind="backward")
    for i in range(3):  # ops 4 to 6, on levels 2 to 4
        builder.op(f"update_{i}", reads=[gradients[i]], mutates=[weights[i]], kind="update")
    graph = builder.build()
    edges = control_edges(graph, graph.core)
    assert list(zip(edges.before.tolist(), edges.after.tolist(), strict=True)) == [(4, 3)]
    assert (edges.num_early, edges.num_late) == (1, 0)


def test_control_edges_force_generators_behind_what_their_users_wait_for() -> None:
    builder = Graph.builder("late")
    batch = builder.tensor(4, kind="input")
    empty, a, b, c = (builder.tensor(4) for _ in range(4))
    builder.op("empty", writes=[empty])
    builder.op("side", reads=[batch], writes=[a])
    builder.op("long", reads=[batch], writes=[b])
    builder.op("way", reads=[b], writes=[c])
    builder.op("fill", reads=[a, c, empty])
    graph = builder.build()
    edges = control_edges(graph, graph.core)
    # "way" stands on the level of "empty" itself, just below "fill": the edge from there would have to lead up.
    assert list(zip(edges.before.tolist(), edges.after.tolist(), strict=True)) == [(1, 0)]
    assert (edges.num_early, edges.num_late) == (0, 1)


def test_a_start_that_the_control_edges_make_worse_is_kept() -> None:
    builder = Graph.builder("an update that is dear beside what is alive")
    weight = builder.tensor(8, kind="parameter")
    large, gradient, hidden = builder.tensor(100), builder.tensor(8), builder.tensor(8)
    builder.op("a", writes=[large])
    builder.op("b", reads=[large], writes=[gradient])
    builder.op("c", reads=[large, gradient], writes=[hidden])
    builder.op("d", reads=[large, hidden])  # the edge: the update runs before this
    builder.op("update", reads=[gradient], mutates=[weight], kind="update", workspace_bytes=100)
    graph = builder.build()
    plan = olla.plan(graph, method="model", time_limit=5.0)
    check(graph, plan)
    assert plan.order.tolist() == [0, 1, 2, 3, 4]
    assert "which was kept" in plan.message


@settings(deadline=None)
@given(graphs(max_ops=12))
def test_control_edges_close_no_cycle(graph: Graph) -> None:
    edges = control_edges(graph, graph.core)
    assert graph.core.constrained(edges.before, edges.after).num_ops == graph.num_ops


@given(buffers(max_buffers=12))
def test_the_pyramid_is_nested_and_stacked(case: tuple[list[int], list[int], list[int]]) -> None:
    lower, upper, size = (np.array(values, dtype=np.int64) for values in case)
    fixed = pyramid(lower, upper, size)
    placed = sorted(np.flatnonzero(fixed >= 0).tolist(), key=lambda i: (int(lower[i] - upper[i]), int(-size[i]), i))
    top = 0
    for i, outer in zip(placed, [placed[:1], *([p] for p in placed)], strict=False):
        assert fixed[i] == top
        assert all(lower[o] <= lower[i] and upper[i] <= upper[o] for o in outer)
        top += int(size[i])
    longest = max(upper - lower, default=0)
    assert not placed or upper[placed[0]] - lower[placed[0]] == longest
    assert bool(placed) == bool(len(size))
