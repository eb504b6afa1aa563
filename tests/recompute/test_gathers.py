"""Gathering as recomputation: a parameter stays gathered or is gathered again; nothing else that communicates is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import olla
from olla import _core
from olla.check.collectives import check_kept
from olla.graph import PROFILES, collective_seconds, rules
from olla.graph.collectives import gathers
from olla.order.gathers import gathered_late
from olla.order.overlap import overlapped

RANKS = 4
DEVICE = dataclasses.replace(PROFILES["a100"], name="slow link", peer_bytes_per_second=1e9)
UNIT = 1_000_000


def sharded(layers: list[tuple[int, int]], *, decay: bool = True, half: bool = False) -> olla.Graph:
    """Return a step whose layer i has a parameter and an activation of so many units, forward and backward.

    With `half` every shard is copied first, as for a gather in another type.
    """
    b = olla.Graph.builder("sharded")
    talk = {"group": "0", "ranks": RANKS}
    shards = [b.tensor(UNIT * size, kind="parameter", name=f"p{i}") for i, (size, _) in enumerate(layers)]
    whole, kept = [b.tensor(RANKS * UNIT * size) for size, _ in layers], [b.tensor(UNIT * n) for _, n in layers]
    for i, shard in enumerate(shards):
        size = RANKS * UNIT * layers[i][0]
        if half:
            parameter, shard = shard, b.tensor(UNIT * layers[i][0])
            b.op(f"half {i}", reads=[parameter], writes=[shard], seconds=1e-6)
        b.op(f"gather {i}", reads=[shard], writes=[whole[i]], collective="all_gather", message_bytes=size, **talk)
        b.op(f"arrived {i}", reads=[shard], mutates=[whole[i]], collective="wait", launches=0, **talk)
        b.op(f"forward {i}", reads=[whole[i], *kept[max(i - 1, 0) : i]], writes=[kept[i]], kind="forward", seconds=1e-3)
    passed = b.tensor(8)
    b.op("loss", reads=kept[-1:], writes=[passed], recomputable=False)
    for i in reversed(range(len(layers))):
        gradient, mine, back = b.tensor(RANKS * UNIT * layers[i][0]), b.tensor(UNIT * layers[i][0]), b.tensor(8)
        inputs = [whole[i], kept[i], passed]
        b.op(f"backward {i}", reads=inputs, writes=[gradient, back], kind="backward", seconds=2e-3, recomputable=False)
        size, passed = RANKS * UNIT * layers[i][0], back
        b.op(f"reduce {i}", reads=[gradient], writes=[mine], collective="reduce_scatter", message_bytes=size, **talk)
        b.op(f"reduced {i}", reads=[gradient], mutates=[mine], collective="wait", launches=0, **talk)
        if decay:  # as of AdamW: needs no gradient, and could run first of all
            b.op(f"decay {i}", mutates=[shards[i]], kind="update")
        b.op(f"update {i}", reads=[mine], mutates=[shards[i]], kind="update")
    return b.build()


def issued(graph: olla.Graph) -> list[str]:
    return [n for n, kind in zip(graph.op_names, graph.collectives, strict=True) if kind not in ("", "wait")]


def least_gathers(layers: list[tuple[int, int]], peak: int) -> float:
    """Return the least seconds of gathering again with which the step in program order fits a peak, by brute force."""
    graph = sharded(layers)
    seconds = collective_seconds(graph, DEVICE)
    launch = DEVICE.launch_seconds
    cost = {i: float(seconds[graph.op_names.index(f"gather {i}")]) + launch for i in range(len(layers))}
    best = math.inf
    for again in itertools.product((False, True), repeat=len(layers)):
        live = list(_live(layers, again))
        if max(live) <= peak:
            best = min(best, sum(cost[i] for i, twice in enumerate(again) if twice))
    return best


def _live(layers: list[tuple[int, int]], again: tuple[bool, ...]) -> Iterator[int]:
    """The bytes during forward and backward of each layer, whose activations are all kept."""
    shards = UNIT * sum(size for size, _ in layers)
    whole = [RANKS * UNIT * size for size, _ in layers]
    kept = [UNIT * n for _, n in layers]
    num = len(layers)
    for i in range(num):
        idle = sum(whole[j] for j in range(i) if not again[j])
        yield shards + idle + whole[i] + sum(kept[: i + 1])
    for i in reversed(range(num)):
        idle = sum(whole[j] for j in range(i) if not again[j])
        carried = 8 + 8
        yield shards + idle + whole[i] + sum(kept[: i + 1]) + whole[i] + carried  # its gradient
        yield shards + idle + sum(kept[:i]) + whole[i] + UNIT * layers[i][0] + 8  # which is averaged


sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes, st.floats(0.0, 1.0))
@example([(5, 1), (3, 1), (3, 3)], 0.0)  # gathers that begin early leave gaps in the arena here
@example([(5, 1), (3, 1), (3, 1)], 0.0)
def test_a_budget_gathers_again_no_more_than_the_best_choice_in_program_order(layers: Any, share: float) -> None:
    """Activations here cost less link time to make again than parameters cost: they are not to be, for the oracle."""
    graph = sharded(layers)
    content = graph.to_dict()
    for row in content["ops"]:
        if row.get("kind") == "forward":
            row["recomputable"] = False
    graph = olla.Graph.from_dict(content)
    most = max(_live(layers, (False,) * len(layers)))
    least = max(_live(layers, (True,) * len(layers)))
    peak = int(least + share * (most - least))
    wanted = least_gathers(layers, peak)
    plan = olla.plan(graph, budget=peak, device=DEVICE, in_place=False, alignment=1)
    olla.check(graph, plan)
    assert plan.peak_bytes <= peak
    assert plan.added_seconds <= wanted * (1 + 1e-9)
    assert plan.added_seconds >= plan.added_seconds_lower_bound - 1e-12


def test_added_time_is_that_of_the_link_and_the_base_has_each_gather_once() -> None:
    graph = sharded([(4, 1)] * 4)
    link = collective_seconds(graph, DEVICE)[gathers(graph)].sum()
    plan = olla.plan(graph, minimise="peak", device=DEVICE)
    assert plan.base_seconds == pytest.approx(float(DEVICE.op_seconds(graph).sum() + link))
    again = plan.graph.collectives.count("all_gather") - 4
    assert again >= 3  # all but the last layer's
    assert plan.added_seconds >= again * (3 / 4 * 16 * UNIT / 1e9)
    assert olla.timeline(plan.graph, plan.order, DEVICE).link_seconds > olla.timeline(graph, None, DEVICE).link_seconds


def test_ranks_share_one_order_of_collectives_and_a_file_carries_it(tmp_path: Any) -> None:
    graph = sharded([(4, 3), (1, 5), (3, 2), (2, 2)])
    plan = olla.plan(graph, minimise="peak", device=DEVICE)
    plan.save(tmp_path / "plan.json")
    graph.save(tmp_path / "graph.json")
    again, read = olla.Plan.load(tmp_path / "plan.json"), olla.Graph.load(tmp_path / "graph.json")
    olla.check(read, again)
    last = again.graph
    order = [last.op_names[v] for v in again.order.tolist() if last.collectives[v] not in ("", "wait")]
    assert order == issued(last)
    assert list(dict.fromkeys(order)) == issued(graph)
    assert order.count("reduce 0") == 1
    assert (gathers(read) == gathers(graph)).all()


@pytest.mark.parametrize("half", [False, True])
def test_what_changes_a_shard_early_does_not_end_the_choice(half: bool) -> None:
    plans = [
        olla.plan(sharded([(4, 1)] * 4, decay=d, half=half), minimise="peak", device=DEVICE) for d in (True, False)
    ]
    assert plans[0].peak_bytes == plans[1].peak_bytes


def test_a_copy_of_a_shard_is_made_again_with_what_is_gathered_from_it() -> None:
    graph = sharded([(4, 1)] * 4, half=True)
    names = [graph.op_names[v] for v in np.flatnonzero(gathers(graph))]
    assert names == [f"{what} {i}" for i in range(4) for what in ("gather", "arrived")]
    plan = olla.plan(graph, minimise="peak", device=DEVICE)
    olla.check(graph, plan)
    (found,) = plan.rewrites
    runs = [graph.op_names[v] for v in found.origin]
    assert runs.count("gather 0") == runs.count("half 0") == 2
    other = graph.to_dict()
    other["ops"][0]["recomputable"] = False  # the copy cannot be made again
    assert not gathers(olla.Graph.from_dict(other))[:3].any()


@given(sizes, st.integers(0, 99), st.booleans())
def test_gathering_late_keeps_the_order_valid_and_no_step_higher(layers: Any, seed: int, half: bool) -> None:
    graph = sharded(layers, decay=False, half=half)
    some = np.random.default_rng(seed).permutation(graph.num_ops).astype(np.int32)
    order = _core.nearest_order(graph.core, some)
    late = gathered_late(graph, order)
    assert graph.core.is_order(late)
    before, after = (_core.profile(graph.core, found).peak_bytes for found in (order, late))
    assert after <= before
    place = np.argsort(late)
    for v in np.flatnonzero(gathers(graph) & (np.array(graph.collectives) == "wait")):
        assert place[v] == place[v - 1] + 1  # nothing comes between a gather and its wait


def test_only_all_gathers_of_parameters_that_the_step_begins_with_may_run_again() -> None:
    graph = sharded([(1, 1), (1, 1)])
    names = [graph.op_names[v] for v in np.flatnonzero(gathers(graph))]
    assert names == ["gather 0", "arrived 0", "gather 1", "arrived 1"]
    rerun = dict(zip(graph.op_names, rules(graph, DEVICE).rerun.tolist(), strict=True))
    assert [rerun[name] for name in ("gather 0", "arrived 1", "reduce 0", "reduced 0")] == [3, 3, 0, 0]
    for change in (
        lambda c: c["tensors"][0].update(kind="buffer"),
        lambda c: c["ops"][0].update(recomputable=False),
        lambda c: c["ops"][0].update(collective="all_to_all"),
    ):
        content = graph.to_dict()
        change(content)
        other = olla.Graph.from_dict(content)
        assert [other.op_names[v] for v in np.flatnonzero(gathers(other))] == names[2:]


def rewritten() -> tuple[olla.Graph, Any]:
    graph = sharded([(4, 1)] * 3)
    plan = olla.plan(graph, minimise="peak", device=DEVICE)
    (found,) = plan.rewrites
    return graph, found


def test_the_checker_refuses_a_reduction_that_runs_again() -> None:
    graph, found = rewritten()
    v = int(np.flatnonzero([graph.op_names[u] == "reduce 1" for u in found.origin])[0])
    wrong = [*range(found.graph.num_ops), v]
    content = found.graph.to_dict()
    row = dict(content["ops"][v])
    row["writes"] = [len(content["tensors"])]
    content["tensors"].append(dict(content["tensors"][found.graph.writes.of(v)[0]]))
    content["ops"].append(row)
    with pytest.raises(olla.PlanError, match=r"\(reduce 1\) communicates, and runs 2 times: expected once"):
        check_kept(graph, olla.Graph.from_dict(content), np.array([found.origin[i] for i in wrong]))


def test_the_checker_refuses_a_gather_that_nobody_waits_for_or_that_is_read_too_early() -> None:
    graph, found = rewritten()
    waits = [v for v in range(found.graph.num_ops) if found.rerun[v] == 3 and found.graph.collectives[v] == "wait"]
    keep = [v for v in range(found.graph.num_ops) if v != waits[-1]]
    content = found.graph.to_dict()
    content["ops"] = [{**content["ops"][v], "after": []} for v in keep]
    with pytest.raises(olla.PlanError, match=r"uses what op \d+ gathers before it has arrived") as error:
        check_kept(graph, olla.Graph.from_dict(content), found.origin[keep])
    assert error.value.rule == "rewrite_collective"


def test_the_checker_refuses_a_shard_that_has_changed_before_it_is_gathered_again() -> None:
    graph, found = rewritten()
    content = found.graph.to_dict()
    last = max(v for v in range(found.graph.num_ops) if found.rerun[v] == 3 and found.graph.collectives[v] != "wait")
    shard = found.graph.reads.of(last)[0]
    decay = next(v for v in range(found.graph.num_ops) if shard in found.graph.mutates.of(v))
    assert decay > last
    order = [v for v in range(found.graph.num_ops) if v != decay]
    order.insert(order.index(last), decay)
    new = {v: i for i, v in enumerate(order)}
    content["ops"] = [
        {**content["ops"][v], "after": [new[u] for u in content["ops"][v].get("after", []) if new[u] < new[v]]}
        for v in order
    ]
    wrong = dataclasses.replace(
        found, graph=olla.Graph.from_dict(content), origin=found.origin[order], rerun=found.rerun[order]
    )
    from olla.check.recomputed import check_equivalent

    with pytest.raises(olla.PlanError, match="reads other values"):
        check_equivalent(graph, wrong.graph, wrong.origin, wrong.rerun, wrong.tensor_origin, rules(graph, DEVICE))


def test_the_integer_program_keeps_what_is_gathered() -> None:
    plan = olla.plan(sharded([(2, 1)] * 2), max_slowdown=1.0, device=DEVICE, method="ilp", time_limit=5.0)
    assert plan.graph.collectives.count("all_gather") == 2


def test_what_is_gathered_again_is_fetched_ahead_as_far_as_the_peak_allows() -> None:
    b = olla.Graph.builder("a hill before")
    shard, whole, hill = b.tensor(UNIT, kind="parameter"), b.tensor(4 * UNIT), b.tensor(9 * UNIT)
    talk = {"group": "0", "ranks": RANKS}
    steps = [b.tensor(8) for _ in range(9)]
    b.op("hill", writes=[hill], seconds=1e-3)
    b.op("top", reads=[hill], writes=steps[:1], seconds=1e-3)
    for i in range(8):
        b.op(f"after {i}", reads=[steps[i]], writes=[steps[i + 1]], seconds=1e-3)
    b.op("gather", reads=[shard], writes=[whole], collective="all_gather", message_bytes=4 * UNIT, **talk)
    b.op("arrived", reads=[shard], mutates=[whole], collective="wait", launches=0, **talk)
    b.op("use", reads=[whole, steps[-1]], seconds=1e-3)
    graph = b.build()
    found = overlapped(graph, graph.core, np.arange(graph.num_ops, dtype=np.int32), DEVICE)
    names = [graph.op_names[v] for v in found]
    assert names[:2] == ["hill", "top"]  # above them there is no room
    assert names.index("gather") in (6, 7)  # 3 ms on the link before it is used
    before, after = (olla.timeline(graph, order, DEVICE).exposed_seconds for order in (None, found))
    assert (before > 2.9e-3, after) == (True, 0.0)
