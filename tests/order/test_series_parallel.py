"""Orders of trees and series-parallel graphs are proved best, small ones by exhaustive search, large ones at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import Graph, _core
from tests.support import oracle
from tests.support.order.trees import SHAPES, tables, tensors_along

EXACT = ("in_tree", "out_tree", "glued_trees", "series_parallel")


def solve(graph: Graph, seconds: float = 60.0) -> tuple[int, int]:
    program = np.arange(graph.num_ops, dtype=np.int32)
    limits = _core.Limits(time_limit=seconds, max_work=None, progress=None)
    found = _core.order(graph.core, [program], 0, limits)
    assert graph.core.is_order(found.order)
    assert _core.profile(graph.core, found.order).peak_bytes == found.peak_bytes
    return found.peak_bytes, found.lower_bound_bytes


@st.composite
def shaped(draw: st.DrawFn, max_ops: int = 9) -> Graph:
    """Graphs of every shape, sizes and ends; the numbers behind them are a seed's."""
    return tensors_along(
        draw(st.sampled_from(sorted(SHAPES))),
        draw(st.integers(1, max_ops)),
        seed=draw(st.integers(0, 1 << 30)),
        max_bytes=draw(st.sampled_from((0, 1, 5, 100, 1 << 40))),
        shared=draw(st.booleans()),
        workspaces=draw(st.booleans()),
        outputs=draw(st.booleans()),
    )


@settings(max_examples=2000, deadline=None)
@given(shaped())
def test_peak_and_bound_equal_exhaustive_search(graph: Graph) -> None:
    peak, bound = solve(graph)
    assert peak == bound == oracle.best_peak(graph)


@pytest.mark.parametrize("num_ops", [1_000, 20_000])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize("shape", EXACT)
def test_large_ones_are_proved_within_a_second(shape: str, max_bytes: int, num_ops: int) -> None:
    for outputs in (False, True):
        graph = tensors_along(shape, num_ops, seed=num_ops, max_bytes=max_bytes, workspaces=True, outputs=outputs)
        start = time.process_time()
        plan = olla.plan(graph, layout=False)
        assert time.process_time() - start < 5  # one on an idle machine; sanitized and busy ones take longer
        assert plan.peak_bytes == plan.lower_bound_bytes
        olla.check(graph, plan)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", ["out_tree", "glued_trees"])
def test_trees_whose_children_share_a_tensor_are_planned_close_to_the_bound(shape: str, seed: int) -> None:
    graph = tensors_along(shape, 2_000, seed=seed, shared=True, workspaces=seed % 2 == 1)
    plan = olla.plan(graph, layout=False, time_limit=2)
    assert plan.peak_bytes <= 1.01 * plan.lower_bound_bytes


@pytest.mark.parametrize("num", [400, 4_000])
def test_steps_of_very_many_tables_are_proved(num: int) -> None:
    graph = tables(num)
    start = time.process_time()
    plan = olla.plan(graph, layout=False)
    assert time.process_time() - start < 10
    assert plan.peak_bytes == plan.lower_bound_bytes
    olla.check(graph, plan)
