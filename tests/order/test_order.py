"""The order search agrees with exhaustive search, and obeys the laws any right answer obeys."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla import Graph, PlanError, _core
from tests.support import oracle
from tests.support.samples import scaled, wide_graph
from tests.support.strategies import graphs, graphs_with_order

SEED = 0


def limits(seconds: float, progress: Any = None) -> _core.Limits:
    return _core.Limits(time_limit=seconds, max_work=None, progress=progress)


def solve(graph: Graph, seconds: float = 60.0) -> tuple[list[int], int, int]:
    program = np.arange(graph.num_ops, dtype=np.int32)
    found = _core.order(graph.core, [program], SEED, limits(seconds))
    assert oracle.is_order(graph, found.order.tolist())
    return found.order.tolist(), found.peak_bytes, found.lower_bound_bytes


@settings(max_examples=300)
@given(graphs(max_ops=9))
def test_peak_and_bound_equal_exhaustive_search(graph: Graph) -> None:
    order, peak, bound = solve(graph)
    assert peak == bound == oracle.best_peak(graph)
    assert peak == max(oracle.live_bytes(graph, order), default=graph.resident_bytes)


def relabelled(graph: Graph, op_of: list[int], tensor_of: list[int]) -> Graph:
    """Return the graph with its ops in program order ``op_of`` and tensor t of the new graph being tensor_of[t]."""
    new_tensor = {old: new for new, old in enumerate(tensor_of)}
    new_op = {old: new for new, old in enumerate(op_of)}
    content = graph.to_dict()
    content["tensors"] = [content["tensors"][t] for t in tensor_of]
    content["outputs"] = [new_tensor[t] for t in content["outputs"]]
    ops = [dict(content["ops"][v]) for v in op_of]
    for op in ops:
        for key in ("reads", "writes", "mutates"):
            op[key] = [new_tensor[t] for t in op.get(key, [])]
        op["after"] = [new_op[v] for v in op.get("after", [])]
    return Graph.from_dict({**content, "ops": ops})


@settings(max_examples=100)
@given(st.data())
def test_relabelling_changes_no_peak(data: st.DataObject) -> None:
    graph, program = data.draw(graphs_with_order())
    tensors = data.draw(st.permutations(range(graph.num_tensors)))
    # Mutations keep their places among the uses of their tensor in any valid program order, so it is the same step.
    assert solve(relabelled(graph, program, list(tensors)))[1:] == solve(graph)[1:]


@settings(max_examples=100)
@given(graphs(max_ops=10))
def test_doubling_sizes_doubles_the_peak(graph: Graph) -> None:
    assert solve(scaled(graph, 2))[1] == 2 * solve(graph)[1]


@settings(max_examples=50)
@given(graphs(min_ops=10, max_ops=30))
def test_the_bound_never_passes_the_peak(graph: Graph) -> None:
    _, peak, bound = solve(graph, 1.0)
    assert graph.resident_bytes <= bound <= peak
    assert peak <= max(oracle.live_bytes(graph, list(range(graph.num_ops))))


def test_same_seed_gives_the_same_order() -> None:
    graph = wide_graph(80)
    first = solve(graph)
    assert first[1] < max(oracle.live_bytes(graph, list(range(80))))
    assert solve(graph) == first


def test_a_start_that_is_no_order_is_refused() -> None:
    builder = Graph.builder("two")
    tensor = builder.tensor(1)
    builder.op("write", writes=[tensor])
    builder.op("read", reads=[tensor])
    with pytest.raises(PlanError, match="start 0"):
        _core.order(builder.build().core, [np.array([1, 0], dtype=np.int32)], SEED, limits(1.0))


def test_the_time_limit_is_kept() -> None:
    graph = wide_graph(3000)
    program = np.arange(graph.num_ops, dtype=np.int32)
    start = time.perf_counter()
    order = _core.order(graph.core, [program], SEED, limits(0.5)).order
    assert time.perf_counter() - start < 5.0
    assert graph.core.is_order(order)


def test_progress_can_stop_the_search() -> None:
    graph = wide_graph(3000)
    calls: list[tuple[str, float, int, int]] = []

    def progress(stage: str, seconds: float, value: int, bound: int) -> bool:
        calls.append((stage, seconds, value, bound))
        return False

    program = np.arange(graph.num_ops, dtype=np.int32)
    assert _core.order(graph.core, [program], SEED, limits(60.0, progress)).cancelled
    assert len(calls) == 1
    stage, seconds, value, bound = calls[0]
    assert stage == "order"
    assert 0.0 <= seconds < 30.0
    assert 0 < bound < value
