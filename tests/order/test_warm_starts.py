"""The warm start is a valid order, as its rule says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings

from olla import Graph, _core
from olla.order.warm_starts import hoist
from tests.support import oracle
from tests.support.strategies import graphs


@settings(max_examples=200)
@given(graphs(max_ops=12))
def test_it_is_a_valid_order(graph: Graph) -> None:
    order = hoist(graph)
    assert order.dtype == np.int32
    assert oracle.is_order(graph, order.tolist())


@settings(max_examples=100)
@given(graphs(min_ops=3, max_ops=8))
def test_it_obeys_extra_precedences(graph: Graph) -> None:
    before, after = np.array([graph.num_ops - 1], dtype=np.int32), np.array([0], dtype=np.int32)
    if oracle.dependencies(graph)[graph.num_ops - 1]:
        return  # the last op may need the first one
    core = graph.core.constrained(before, after)
    program = np.array([graph.num_ops - 1, *range(graph.num_ops - 1)], dtype=np.int32)
    assert core.is_order(hoist(graph, core, program))


def training_step(num_layers: int) -> Graph:
    """Forward, backward, and at the end one update per weight: the program keeps every gradient until then."""
    builder = Graph.builder("layers")
    weights = [builder.tensor(100, kind="parameter") for _ in range(num_layers)]
    activations, gradients = [builder.tensor(1, kind="input")], []
    for weight in weights:
        activations.append(builder.tensor(1))
        builder.op("forward", kind="forward", reads=[activations[-2], weight], writes=[activations[-1]])
    for weight, activation in zip(reversed(weights), reversed(activations[:-1]), strict=True):
        gradients.append(builder.tensor(100))
        builder.op("backward", kind="backward", reads=[activation, weight, activations[-1]], writes=[gradients[-1]])
    for weight, gradient in zip(reversed(weights), gradients, strict=True):
        builder.op("update", kind="update", reads=[gradient], mutates=[weight])
    return builder.build()


def test_it_runs_each_update_right_after_its_gradient() -> None:
    graph = training_step(4)
    hoisted = hoist(graph)
    kinds = [graph.op_kinds[v] for v in hoisted.tolist()]
    assert kinds == ["forward"] * 4 + ["backward", "update"] * 4
    program = np.arange(graph.num_ops, dtype=np.int32)
    assert _core.profile(graph.core, hoisted).peak_bytes < _core.profile(graph.core, program).peak_bytes


def test_allocations_are_held_back_until_they_are_used() -> None:
    builder = Graph.builder("zeros first")
    zeros, large = builder.tensor(50), builder.tensor(70)
    first = builder.op("zeros", writes=[zeros])
    second = builder.op("large", reads=[builder.tensor(1, kind="input")], writes=[large])
    third = builder.op("read large", reads=[large], after=[second])
    fourth = builder.op("use zeros", reads=[zeros], after=[third])
    assert hoist(builder.build()).tolist() == [second, third, first, fourth]


def test_a_deep_graph_needs_no_recursion() -> None:
    builder = Graph.builder("deep")
    last = builder.tensor(1, kind="input")
    for _ in range(20_000):
        tensor = builder.tensor(1)
        builder.op("op", reads=[last], writes=[tensor])
        last = tensor
    assert hoist(builder.build()).tolist() == list(range(20_000))


def test_a_short_limit_does_not_wait_for_numba() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import olla
from tests.support.plans import hard_graph
graph = hard_graph()
olla.check(graph, olla.plan(graph, time_limit=1.0))
assert "numba" not in sys.modules
olla.check(graph, olla.plan(graph, time_limit=30.0))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
