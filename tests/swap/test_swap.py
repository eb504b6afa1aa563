"""Swapping: the graph that swaps, its check, AutoSwap by name, and ours beside it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import _core
from olla.check.swapped import check_swaps
from olla.errors import BudgetError, PlanError
from olla.graph import Graph, profile_of
from olla.plan import Link
from olla.plan.swapped import SWAP_IN, SWAP_OUT
from olla.plan.swaps import PCIE3
from olla.swap import plan_swaps, swapped_graph
from olla.swap.autoswap import SCORES, AutoSwap
from olla.swap.search import SwapSearch
from tests.support.samples import SHARED
from tests.support.strategies import graphs_with_order
from tests.support.swaps import MB, SLOW, chain, program


def test_swapping_lowers_the_peak_without_stalling() -> None:
    g = chain()
    swaps = plan_swaps(g, program(g), g.seconds, SLOW, time_limit=0.2)
    assert swaps.stall_seconds == 0.0
    assert swaps.peak_bytes < olla.plan(g, method="program", layout=False).peak_bytes
    assert swaps.host_bytes <= swaps.swapped_bytes == g.tensor_bytes[swaps.tensor].sum()


def test_graph_that_swaps_has_the_simulated_peak_and_passes_the_check() -> None:
    g = chain()
    swaps = plan_swaps(g, program(g), g.seconds, SLOW, time_limit=0.2)
    found = swapped_graph(g, program(g), swaps)
    swapped, origin = found.graph, found.origin
    assert _core.profile(swapped.core, program(swapped)).peak_bytes == swaps.peak_bytes
    assert [swapped.targets[i] for i in np.flatnonzero(origin < 0)].count(SWAP_OUT) == len(swaps.tensor)
    check_swaps(g, swapped, origin)


@settings(max_examples=150, deadline=None)
@given(graphs_with_order(max_ops=12), st.integers(0, 2**20), st.sampled_from([0.0, 0.3]))
def test_any_choice_of_blocks_gives_a_valid_graph_with_the_simulated_peak(
    graph_with_order: tuple[Graph, list[int]], seed: int, stall: float
) -> None:
    g, order = graph_with_order[0], np.array(graph_with_order[1], dtype=np.int32)
    random = np.random.default_rng(seed)
    seconds = random.integers(1, 4, g.num_ops).astype(np.float64)
    search = SwapSearch(g, order, seconds, Link.of(float(max(1, g.tensor_bytes.max(initial=1)))), min_bytes=1)
    blocks = np.flatnonzero(random.random(len(search.blocks.tensor)) < 0.7).astype(np.int32)
    limit = int(search.live.max(initial=0) * 0.8) if stall else None
    swaps = search.evaluate(blocks, limit)
    found = swapped_graph(g, order, swaps)
    swapped, origin = found.graph, found.origin
    check_swaps(g, swapped, origin)
    if g.num_ops:
        assert _core.profile(swapped.core, program(swapped)).peak_bytes == swaps.peak_bytes


def test_stall_buys_a_lower_limit_and_is_reported() -> None:
    g = chain()
    free = plan_swaps(g, program(g), g.seconds, SLOW, time_limit=0.2)
    slow = plan_swaps(g, program(g), g.seconds, Link.of(2 * MB), max_slowdown=0.5, time_limit=0.3)
    none = plan_swaps(g, program(g), g.seconds, Link.of(2 * MB), time_limit=0.2)
    assert slow.peak_bytes < none.peak_bytes
    assert 0.0 < slow.slowdown <= 0.5 + 1e-9
    assert free.peak_bytes < none.peak_bytes


def test_host_budget_bounds_what_is_in_host_memory() -> None:
    g = chain()
    free = plan_swaps(g, program(g), g.seconds, SLOW, time_limit=0.2)
    bounded = plan_swaps(g, program(g), g.seconds, SLOW, host_bytes=4 << 20, time_limit=0.2)
    assert bounded.host_bytes <= 4 << 20 < free.host_bytes
    assert bounded.peak_bytes > free.peak_bytes


def test_limit_that_needs_no_stall_is_reached_without_one() -> None:
    g = chain()
    free = plan_swaps(g, program(g), g.seconds, SLOW, time_limit=0.2)
    fitted = plan_swaps(g, program(g), g.seconds, SLOW, limit=free.peak_bytes, max_slowdown=1.0, time_limit=0.5)
    assert fitted.peak_bytes <= free.peak_bytes
    assert fitted.stall_seconds == 0.0


@pytest.mark.parametrize("score", SCORES)
def test_every_score_lowers_the_peak_at_no_overhead(score: str) -> None:
    g = chain()
    method = AutoSwap(g, program(g), g.seconds, SLOW)
    swaps = method.least_peak(score)
    assert swaps.stall_seconds == 0.0
    assert swaps.peak_bytes < method.peak_bytes


def test_scores_are_those_of_the_paper() -> None:
    b = Graph.builder("one gap")
    x, z = b.tensor(2 * MB), b.tensor(10)
    _ = b.op("make", writes=[x], seconds=1.0), b.op("wait", writes=[z], seconds=4.0)
    _ = b.op("more", reads=[z], writes=[b.tensor(3 * MB)], seconds=2.0), b.op("use", reads=[x], seconds=1.0)
    g = b.build()
    method = AutoSwap(g, program(g), g.seconds, Link(out_bytes_per_second=2 * MB, in_bytes_per_second=4 * MB,
                                                      out_latency_seconds=0.25, in_latency_seconds=0.125))  # fmt: skip
    (block,) = method.candidates
    load, limit, ids = method.search.live, 1 * MB, np.array([block])
    absence = 6.0 - (1.0 + 0.25) - (0.5 + 0.125)
    assert method.score("DOA", ids, load, limit) == pytest.approx([absence])
    assert method.score("AOA", ids, load, limit) == pytest.approx([absence * 2 * MB])
    assert method.score("WDOA", ids, load, limit) == pytest.approx([4.0 * (MB + 10) + 2.0 * (4 * MB + 10)])


def test_plan_by_autoswap_is_checked_against_the_original_graph() -> None:
    g = chain()
    plan = olla.plan(g, method="autoswap", link=SLOW, time_limit=1.0)
    olla.check(g, plan)
    assert plan.peak_bytes < plan.base_peak_bytes  # type: ignore[attr-defined]
    budget = plan.peak_bytes
    within = olla.plan(g, method="autoswap", link=SLOW, budget=budget, time_limit=1.0)
    assert within.peak_bytes <= budget
    with pytest.raises(BudgetError, match="AutoSwap does not reach it"):
        olla.plan(g, method="autoswap", link=SLOW, budget=1000, time_limit=1.0)


def test_swaps_on_top_of_recomputation_are_checked_against_the_original_graph() -> None:
    g = chain()
    recomputed = olla.plan(g, max_slowdown=0.1, time_limit=2.0)
    plan = olla.plan(g, max_slowdown=0.1, swap=True, link=SLOW, time_limit=2.0)
    olla.check(g, plan)
    assert plan.swapped is not None
    assert plan.peak_bytes < recomputed.peak_bytes
    assert plan.slowdown <= 0.1 + 1e-9


def test_budget_is_met_by_swaps_and_no_slower_than_by_recomputation_alone() -> None:
    g = chain()
    free = olla.plan(g, max_slowdown=0.0, swap=True, link=SLOW, time_limit=2.0)
    budget = free.peak_bytes
    plan = olla.plan(g, budget=budget, swap=True, link=SLOW, time_limit=2.0)
    alone = olla.plan(g, budget=budget, time_limit=2.0)
    assert plan.peak_bytes <= budget
    assert plan.added_seconds <= alone.added_seconds
    with pytest.raises(BudgetError, match="no plan fits it: every one needs at least"):
        olla.plan(g, budget=1000, swap=True, link=SLOW, time_limit=2.0)


def test_swap_without_a_goal_is_an_error() -> None:
    with pytest.raises(ValueError, match="swap is for a goal"):
        olla.plan(chain(), swap=True)


def test_graphs_that_compute_something_else_are_rejected() -> None:
    g = chain()
    found = swapped_graph(g, program(g), plan_swaps(g, program(g), g.seconds, SLOW, time_limit=0.2))
    swapped, origin = found.graph, found.origin

    def rejected(rule: str, **columns: object) -> None:
        parts = swapped.to_dict()
        for key, value in columns.items():
            i, field = key.split("_", 1)
            parts["ops"][int(i.removeprefix("op"))][field] = value
        with pytest.raises(PlanError) as error:
            check_swaps(g, Graph.from_dict(parts), origin)
        assert error.value.rule == rule

    outs = [i for i in range(swapped.num_ops) if swapped.targets[i] == SWAP_OUT]
    ins = [i for i in range(swapped.num_ops) if swapped.targets[i] == SWAP_IN]
    used = next(i for i in range(ins[0], swapped.num_ops) if swapped.writes.of(ins[0])[0] in swapped.reads.of(i))
    rejected("swap_copy", **{f"op{outs[0]}_target": "olla::swap_in"})
    rejected("swap_copy", **{f"op{ins[0]}_target": "aten.clone"})
    gone = int(swapped.reads.of(outs[0])[0])
    rejected("swap_uses", **{f"op{outs[-1] + 1}_reads": [gone]})
    other = [t for t in swapped.reads.of(used).tolist() if t != swapped.writes.of(ins[0])[0]]
    rejected("swap_uses", **{f"op{used}_reads": other})
    with pytest.raises(PlanError) as error:
        check_swaps(g, swapped, np.where(origin == 0, 1, origin).astype(np.int32))
    assert error.value.rule == "swap_ops"


def test_link_speed_must_be_positive() -> None:
    with pytest.raises(ValueError, match="out_bytes_per_second of a link is 0"):
        Link.of(0.0)
    assert replace(PCIE3, in_latency_seconds=0.0).in_latency_seconds == 0.0


@pytest.mark.skipif(not (SHARED / "graphs").is_dir(), reason="needs the captured graphs; set OLLA_SHARED")
@pytest.mark.parametrize("name", ["resnet18_b32", "vgg11_b32"])
def test_ours_is_at_least_as_good_as_autoswap(name: str) -> None:
    g = Graph.load(SHARED / "graphs" / f"{name}.json.gz")
    seconds = profile_of("gtx1080ti").op_seconds(g)
    method = AutoSwap(g, program(g), seconds)
    for slowdown in (0.0, 0.05):
        theirs = min((method.least_peak(score, slowdown) for score in SCORES), key=lambda swaps: swaps.peak_bytes)
        ours = plan_swaps(g, program(g), seconds, PCIE3, max_slowdown=slowdown, time_limit=2.0)
        assert ours.peak_bytes <= theirs.peak_bytes
        assert ours.slowdown <= slowdown + 1e-6
