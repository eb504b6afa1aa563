"""Choices of swaps on small graphs, beside brute force, bounds and budgets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import olla
from olla import _core
from olla.check.swapped import check_copies, check_swaps
from olla.errors import BudgetError
from olla.graph import DeviceProfile, Graph, rules
from olla.plan import Link
from olla.swap import swapped_graph
from olla.swap.bound import SwapBound, working_sets
from olla.swap.search import SwapSearch
from tests.support.strategies import graphs, graphs_with_order
from tests.support.swaps import program


@pytest.fixture(autouse=True, scope="module")
def small_blocks_are_swapped_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("olla.swap.choose.MIN_BYTES", 1)
        yield


SECONDS = DeviceProfile(
    name="toy",
    flops_per_second=1.0,
    bytes_per_second=1.0,
    launch_seconds=1.0,
    to_host_bytes_per_second=1e4,
    from_host_bytes_per_second=1e4,
)


def every_subset(search: SwapSearch, **options: Any) -> int:
    """Return the least peak over all choices of blocks and both orders of the copies out, without a stall."""
    num = len(search.blocks.tensor)
    subsets = itertools.chain.from_iterable(itertools.combinations(range(num), k) for k in range(num + 1))
    found = (
        search.evaluate(np.array(chosen, dtype=np.int32), by_last=by_last, **options)
        for chosen in subsets
        for by_last in (True, False)
    )
    return min(swaps.peak_bytes for swaps in found if swaps.stall_seconds <= 1e-9)


@settings(max_examples=60, deadline=None)
@given(graphs_with_order(max_ops=9), st.integers(0, 2**20))
def test_choice_of_swaps_is_that_of_brute_force_on_small_graphs(
    graph_with_order: tuple[Graph, list[int]], seed: int
) -> None:
    g, order = graph_with_order[0], np.array(graph_with_order[1], dtype=np.int32)
    seconds = np.random.default_rng(seed).integers(1, 4, g.num_ops).astype(np.float64)
    search = SwapSearch(g, order, seconds, Link.of(float(max(1, g.tensor_bytes.max(initial=1)))), min_bytes=1)
    if g.num_ops and len(search.blocks.tensor) <= 6:
        limits = _core.Limits(time_limit=60.0, max_work=None, progress=None)
        assert search.least_peak(0.0, limits, num_rounds=40).peak_bytes == every_subset(search)


@settings(max_examples=25, deadline=None)
@given(graphs(min_ops=1, max_ops=8), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([1e3, 1e4]), st.booleans())
def test_no_choice_of_reruns_and_swaps_is_below_the_bound(
    graph: Graph, slowdown: float, speed: float, in_place: bool
) -> None:
    may = rules(graph, SECONDS, in_place=in_place)
    link = Link.of(speed)
    plan = olla.plan(
        graph, max_slowdown=slowdown, swap=True, link=link, device=SECONDS, in_place=in_place, time_limit=0.2
    )
    # The plan is bounded over some ops; here over all.
    bound, ops = SwapBound(graph, may, link), np.arange(graph.num_ops, dtype=np.int32)
    added = max(slowdown * plan.base_seconds, plan.added_seconds)
    assert bound.least_peak(ops, added) <= plan.peak_bytes
    assert bound.least_added_seconds(ops, plan.peak_bytes, plan.added_seconds) <= plan.added_seconds + 1e-9
    assert working_sets(graph, may).max() <= plan.peak_bytes


@settings(max_examples=60, deadline=None)
@given(graphs_with_order(max_ops=9), st.sampled_from([0.0, 0.5]), st.integers(0, 2**20))
def test_no_choice_of_swaps_alone_is_below_the_bound_in_any_order(
    graph_with_order: tuple[Graph, list[int]], stall: float, seed: int
) -> None:
    g, order = graph_with_order[0], np.array(graph_with_order[1], dtype=np.int32)
    if g.num_ops == 0:
        return
    may = rules(g, SECONDS, in_place=False, recompute=False)
    link = Link.of(float(max(1, g.tensor_bytes.max(initial=1))))
    search = SwapSearch(g, order, may.seconds, link, min_bytes=1)
    random = np.random.default_rng(seed)
    bound = SwapBound(g, may, link)
    for share in (0.9, 0.6, 0.3):
        blocks = np.flatnonzero(random.random(len(search.blocks.tensor)) < 0.7).astype(np.int32)
        swaps = search.evaluate(blocks, int(search.live.max() * share) if stall else None)
        assert bound.least_peak(np.arange(g.num_ops, dtype=np.int32), swaps.stall_seconds) <= swaps.peak_bytes
        swapped = swapped_graph(g, order, swaps).graph
        assert _core.profile(swapped.core, program(swapped)).peak_bytes == swaps.peak_bytes


@settings(max_examples=25, deadline=None)
@given(graphs(min_ops=1, max_ops=10), st.integers(1, 30_000), st.integers(1, 20_000))
def test_a_plan_is_within_its_budgets_or_refused(graph: Graph, budget: int, host_budget: int) -> None:
    try:
        plan = olla.plan(
            graph, budget=budget, host_budget=host_budget, link=1e3, device=SECONDS, alignment=1, time_limit=0.2
        )
    except BudgetError:
        event("refused")
        return
    event(f"swaps: {plan.swapped_bytes > 0}")
    assert plan.peak_bytes <= budget
    assert plan.host_bytes <= host_budget
    olla.check(graph, plan)


@settings(max_examples=100, deadline=None)
@given(graphs_with_order(max_ops=10), st.integers(0, 2**20), st.sampled_from([0.0, 0.3]))
def test_any_choice_with_lasting_tensors_gives_a_valid_graph_with_the_simulated_peak(
    graph_with_order: tuple[Graph, list[int]], seed: int, stall: float
) -> None:
    g, order = graph_with_order[0], np.array(graph_with_order[1], dtype=np.int32)
    random = np.random.default_rng(seed)
    seconds = random.integers(1, 4, g.num_ops).astype(np.float64)
    lasting = ~g.donated & (g.tensor_bytes > 0)
    lasting[g.writes.item] = False
    lasting[g.outputs] = False
    speed = Link.of(float(max(1, g.tensor_bytes.max(initial=1))))
    search = SwapSearch(g, order, seconds, speed, min_bytes=1, lasting=np.flatnonzero(lasting).astype(np.int32))
    blocks = np.flatnonzero(random.random(len(search.blocks.tensor)) < 0.7).astype(np.int32)
    swaps = search.evaluate(blocks, int(search.live.max(initial=0) * 0.8) if stall else None)
    found = swapped_graph(g, order, swaps)
    swapped = found.graph
    check_swaps(g, swapped, found.origin)
    check_copies(g, swapped, found.origin, swaps)
    event(f"lasting: {bool(np.any(swaps.last < 0))}")
    if g.num_ops:
        assert _core.profile(swapped.core, program(swapped)).peak_bytes == swaps.peak_bytes
