"""Plans that swap: files, host memory, bounds, decisions; choices compared with brute force."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from strategies import graphs, graphs_with_order
from test_budget import training_chain
from test_chunked import LanguageModel
from test_swap import SLOW, chain, program

import olla
from generate import random_graph
from olla import _core
from olla.check.swapped import check_copies, check_swaps
from olla.cli.parser import main
from olla.errors import BudgetError, PlanError
from olla.graph import DeviceProfile, Graph, profile_of, rules
from olla.plan import Link, Plan
from olla.plan.recomputed import Decision
from olla.plan.swapped import SwapDecision
from olla.planner import needed_bytes
from olla.recompute import search
from olla.swap import combine, swapped_graph
from olla.swap.bound import SwapBound, working_sets
from olla.swap.search import Search

SECONDS = DeviceProfile(
    name="toy",
    flops_per_second=1.0,
    bytes_per_second=1.0,
    launch_seconds=1.0,
    to_host_bytes_per_second=1e4,
    from_host_bytes_per_second=1e4,
)


@pytest.fixture(autouse=True, scope="module")
def small_blocks_are_swapped_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("olla.swap.choose.MIN_BYTES", 1)
        yield


def planned(graph: Graph, **options: Any) -> Plan:
    given: dict[str, Any] = {"max_slowdown": 0.1, "swap": True, "link": SLOW, "time_limit": 1.0}
    return olla.plan(graph, **(given | options))


def test_swapping_is_on_where_host_memory_is_granted_or_it_is_asked_for() -> None:
    g = chain()
    assert olla.plan(g, max_slowdown=0.1, host_budget="64GB", time_limit=1.0).swapped is not None
    assert olla.plan(g, max_slowdown=0.1, swap=True, time_limit=1.0).swapped is not None
    assert olla.plan(g, max_slowdown=0.1, time_limit=1.0).swapped is None
    assert olla.plan(g, max_slowdown=0.1, host_budget="64GB", swap=False, time_limit=1.0).swapped is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_budget": "1GB"}, "host_budget is for a goal"),
        ({"swap": True}, "swap is for a goal"),
        ({"link": 1e9, "max_slowdown": 0.1}, "link is given, but nothing may be swapped"),
        ({"method": "autoswap", "swap": False}, "method 'autoswap' does nothing else"),
    ],
)
def test_options_of_swapping_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        olla.plan(chain(), **options)


@pytest.mark.parametrize("host_budget", [0, -1, "0GB", "1 parsec", "nan", 1.5])
def test_host_memory_is_parsed_as_strictly_as_a_budget(host_budget: Any) -> None:
    with pytest.raises(BudgetError, match="host_budget"):
        olla.plan(chain(), max_slowdown=0.1, host_budget=host_budget)


def test_host_memory_stays_within_its_budget_and_costs_memory_or_time() -> None:
    g = chain()
    free, bounded = planned(g), planned(g, host_budget=4 << 20)
    assert bounded.host_bytes <= 4 << 20 < free.host_bytes
    assert bounded.peak_bytes >= free.peak_bytes
    assert bounded.goal["host_budget_bytes"] == 4 << 20


def test_a_plan_that_swaps_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    g = chain()
    plan = planned(g)
    plan.save(tmp_path / "plan.json.gz")
    loaded = olla.Plan.load(tmp_path / "plan.json.gz")
    assert loaded.to_object() == plan.to_object()
    assert [rewrite.kind for rewrite in loaded.rewrites] == ["recomputed", "swapped"]
    assert loaded.swapped.swaps.stall_seconds == plan.swapped.swaps.stall_seconds
    assert str(loaded) == str(plan)
    olla.check(g, loaded)


@pytest.mark.parametrize("seed", [4, 9, 11, 18, 22])
def test_a_budget_with_swaps_is_met_where_one_without_is_and_no_later(seed: int) -> None:
    graph = random_graph(60, seed=seed, window=20, max_bytes=10_000_000)
    least = olla.plan(graph, minimise="peak", time_limit=30.0)  # work ends all searches, on a busy machine too
    total = needed_bytes(least)
    without = olla.plan(graph, budget=total, time_limit=30.0)
    found = olla.plan(graph, budget=total, swap=True, time_limit=60.0)
    assert needed_bytes(found) <= total
    assert found.added_seconds <= without.added_seconds * (1 + 1e-9)


def test_swaps_go_with_losses_in_chunks_and_a_plan_of_both_survives_its_file(tmp_path: Path) -> None:
    g = LanguageModel().build()
    given = {"max_slowdown": 9.0, "link": 25e9, "time_limit": 10.0}  # mostly launches: the step is tiny
    whole, plan = planned(g, **given), planned(g, chunked_loss=8, **given)
    assert plan.chunked is not None
    assert (plan.source_digest, plan.goal["chunked_loss"], plan.goal["max_slowdown"]) == (g.digest, 8, 9.0)
    assert plan.slowdown <= 9.0
    assert plan.base_seconds == pytest.approx(whole.base_seconds)
    assert plan.base_peak_bytes == whole.base_peak_bytes
    assert plan.peak_lower_bound_bytes <= plan.peak_bytes < whole.peak_bytes
    assert plan.added_seconds_lower_bound <= plan.added_seconds
    assert "in 8 chunks of rows" in str(plan)
    plan.save(tmp_path / "plan.json.gz")
    loaded = olla.Plan.load(tmp_path / "plan.json.gz")
    assert loaded.to_object() == plan.to_object()
    olla.check(g, loaded)
    unchunked = replace(plan, rewrites=plan.rewrites[1:])
    with pytest.raises(PlanError):
        olla.check(g, unchunked)
    olla.check(plan.chunked.graph, replace(unchunked, source_digest=plan.chunked.graph.digest))


def test_a_damaged_file_is_refused_with_the_key(tmp_path: Path) -> None:
    whole = planned(chain()).to_object()
    (tmp_path / "plan.json").write_text(json.dumps(whole))

    def refused(message: str, **changes: object) -> None:
        first, last = whole["rewrites"]
        last = {key: value for key, value in {**last, **changes}.items() if value is not ...}
        (tmp_path / "damaged.json").write_text(json.dumps({**whole, "rewrites": [first, last]}))
        with pytest.raises(PlanError, match=message):
            olla.Plan.load(tmp_path / "damaged.json")

    swaps = whole["rewrites"][1]["swaps"]
    refused(r"'swaps' in 'rewrites\[1\]'", swaps=...)
    refused(r"rewrites\[1\]\.swaps\.out_end\[0\]", swaps={**swaps, "out_end": ["soon"]})
    refused("different lengths", swaps={**swaps, "last": [*swaps["last"], 1]})
    refused("kind is 'given', expected one of", kind="given")
    refused(r"the graph in 'rewrites\[1\]\.graph' is invalid", graph={})


def test_figures_that_the_copies_do_not_bear_out_are_refused() -> None:
    g = chain()
    plan = planned(g)
    s = plan.swapped.swaps
    assert len(s.tensor) > 1
    for changed in (
        replace(s, out_start=s.out_end, out_end=s.out_start),
        replace(s, in_end=s.in_end + 100.0),
        replace(s, host_bytes=s.host_bytes - 1),
        replace(s, stall_seconds=0.0, base_seconds=1.0),
        replace(s, issue=s.issue - 1),
        replace(s, swapped_bytes=0),
        replace(s, start=s.start - 1.0),
    ):
        with pytest.raises(PlanError) as error:
            olla.check(g, replace(plan, rewrites=(plan.rewrites[0], replace(plan.swapped, swaps=changed))))
        assert error.value.rule == "swap_times"


def test_decisions_say_what_was_swapped_and_what_runs_again_and_at_what_price() -> None:
    g = chain()
    plan = planned(g, max_slowdown=0.2)
    found = plan.decisions(g, rules(g, profile_of("a100")))
    swapped = [d for d in found if isinstance(d, SwapDecision)]
    assert sorted(d.tensor for d in swapped) == sorted(plan.swapped.swaps.tensor.tolist())
    assert all(d.absent_seconds > 0 and d.rerun_seconds == 1.0 and "forward" in d.made_by for d in swapped)
    assert sum(isinstance(d, Decision) for d in found) == plan.num_recomputed
    assert any("in host memory for" in line for line in plan.details)


def every_subset(search: Search, **options: Any) -> int:
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
    search = Search(g, order, seconds, Link.of(float(max(1, g.tensor_bytes.max(initial=1)))), min_bytes=1)
    if g.num_ops and len(search.blocks.tensor) <= 6:
        assert search.least_peak(0.0, 60.0, num_rounds=40).peak_bytes == every_subset(search)


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
    search = Search(g, order, may.seconds, link, min_bytes=1)
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


def test_swaps_add_less_time_than_recomputation_alone_where_the_link_is_free() -> None:
    g = chain()
    peak = olla.plan(g, layout=False).peak_bytes
    for share in (0.9, 0.7, 0.5):
        budget = int(share * peak)
        alone = olla.plan(g, budget=budget, time_limit=1.0)
        both = planned(g, max_slowdown=None, budget=budget)
        assert both.added_seconds_lower_bound <= both.added_seconds <= alone.added_seconds
        assert both.peak_bytes <= budget


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1])
def test_swaps_and_added_time_never_raise_the_peak_however_little_work_is_left(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = {search: ("_DROP_WORK", "_IMPROVE_WORK"), combine: ("_SWAP_WORK", "_TURN_WORK")}
    for module, names in works.items():
        for name in names:
            monkeypatch.setattr(module, name, int(share * getattr(module, name)))
    g = training_chain(60)
    given: dict[str, Any] = {"time_limit": 60.0, "layout": False}
    peaks: list[tuple[int, int]] = []
    for slowdown in (0.01, 0.03, 0.1, 0.3):
        alone, both = (
            olla.plan(g, max_slowdown=slowdown, **given),
            planned(g, max_slowdown=slowdown, link=25e9, **given),
        )
        assert both.peak_bytes <= alone.peak_bytes
        peaks.append((alone.peak_bytes, both.peak_bytes))
    assert sorted(peaks, reverse=True) == peaks
    for least, _ in peaks[1::2]:
        alone, both = (
            olla.plan(g, budget=least, **given),
            planned(g, max_slowdown=None, budget=least, link=25e9, **given),
        )
        assert both.added_seconds <= alone.added_seconds


def test_an_impossible_budget_names_the_op_that_forces_it() -> None:
    g = chain()
    least = int(working_sets(g, rules(g, profile_of("a100"))).max())
    with pytest.raises(
        BudgetError, match=rf"no plan fits it: every one needs at least {least} bytes; op \d+ \("
    ) as error:
        planned(g, max_slowdown=None, budget=least - 1)
    assert error.value.ids


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    chain().save(tmp_path / "graph.json.gz")
    return str(tmp_path / "graph.json.gz")


def test_command_line_swaps_saves_checks_and_shows(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "plan.json")
    options = ["--time-limit", "1", "--host-budget", "8MiB"]
    assert main(["plan", graph_file, "--max-slowdown", "0.1", "--json", "-o", saved, *options]) == 0
    summary = json.loads(capsys.readouterr().out)
    for key in (
        "base_seconds",
        "added_seconds",
        "added_seconds_lower_bound",
        "peak_lower_bound_bytes",
        "num_recomputed",
        "swapped_bytes",
        "host_bytes",
    ):
        assert isinstance(summary[key], int | float), key
    assert 0 < summary["host_bytes"] <= 8 << 20
    assert main(["check", graph_file, saved]) == 0
    assert capsys.readouterr().out.startswith("ok: valid")
    assert main(["show", "-v", saved]) == 0
    shown = capsys.readouterr().out
    assert "in host memory at once" in shown
    assert "copied for" in shown


def test_command_line_tells_what_does_not_fit_from_what_is_wrong(
    graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", graph_file, "--budget", "1MB", "--host-budget", "1GB", "--time-limit", "1"]) == 1
    assert "no plan fits it" in capsys.readouterr().err
    assert main(["plan", graph_file, "--budget", "1GB", "--host-budget", "0"]) == 2
    assert "--host-budget '0'" in capsys.readouterr().err
    assert main(["plan", graph_file, "--host-budget", "1GB"]) == 2
    assert "is for a goal" in capsys.readouterr().err
    assert main(["plan", graph_file, "--method", "autoswap", "--no-swap"]) == 2
    options = ["--host-budget", "1GB", "--no-swap", "--max-slowdown", "0.1", "--json", "--time-limit", "1"]
    assert main(["plan", graph_file, *options]) == 0
    assert json.loads(capsys.readouterr().out)["swapped_bytes"] == 0


def test_autoswap_is_a_method_on_the_command_line(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", graph_file, "--method", "autoswap", "--json", "--time-limit", "1"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["method"] == "autoswap"
    assert summary["swapped_bytes"] > 0
    assert summary["peak_bytes"] < summary["base_peak_bytes"]


def with_state(num_layers: int = 4, num_bytes: int = 4 << 20) -> Graph:
    """Forward and backward through layers of a second, then updates of a parameter and its state each."""
    b = Graph.builder("with state")
    weights = [b.tensor(num_bytes, kind="parameter") for _ in range(num_layers)]
    states = [b.tensor(2 * num_bytes, kind="optimizer_state", name=f"state{i}") for i in range(num_layers)]
    x = b.tensor(num_bytes, kind="input")
    for i in range(num_layers):
        before, x = x, b.tensor(num_bytes)
        b.op(f"forward{i}", reads=[before, weights[i]], writes=[x], seconds=1.0)
    for i in reversed(range(num_layers)):
        grad, before, x = b.tensor(num_bytes), x, b.tensor(num_bytes)
        b.op(f"backward{i}", reads=[before, weights[i]], writes=[x, grad], seconds=2.0, recomputable=False)
        b.op(
            f"update{i}", reads=[grad], mutates=[weights[i], states[i]], kind="update", seconds=0.5, recomputable=False
        )
    return b.build()


def test_optimizer_state_waits_in_host_memory_only_where_that_is_asked_for(tmp_path: Path) -> None:
    g = with_state()
    plain, hosted = planned(g, link=Link.of(8e6)), planned(g, link=Link.of(8e6), swap_state=True)
    assert "optimizer_state" not in {plain.graph.tensor_kinds[t] for t in plain.swapped.swaps.tensor}
    assert hosted.goal["swap_state"] is True
    assert hosted.peak_lower_bound_bytes <= hosted.peak_bytes < plain.peak_bytes
    assert any("written by the step before" in line for line in hosted.details)
    hosted.save(tmp_path / "plan.json")
    olla.check(g, olla.Plan.load(tmp_path / "plan.json"))
    lost = hosted.graph.to_dict()
    stores = [op for op in lost["ops"] if op.get("target") == "olla::swap_out" and not op["writes"]]
    assert stores
    stores[0]["mutates"] = [0]
    with pytest.raises(PlanError) as error:
        check_swaps(hosted.recomputed.graph, Graph.from_dict(lost), hosted.swapped.origin)
    assert error.value.rule == "swap_copy"


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
    search = Search(g, order, seconds, speed, min_bytes=1, lasting=np.flatnonzero(lasting).astype(np.int32))
    blocks = np.flatnonzero(random.random(len(search.blocks.tensor)) < 0.7).astype(np.int32)
    swaps = search.evaluate(blocks, int(search.live.max(initial=0) * 0.8) if stall else None)
    found = swapped_graph(g, order, swaps)
    swapped = found.graph
    check_swaps(g, swapped, found.origin)
    check_copies(g, swapped, found.origin, swaps)
    event(f"lasting: {bool(np.any(swaps.last < 0))}")
    if g.num_ops:
        assert _core.profile(swapped.core, program(swapped)).peak_bytes == swaps.peak_bytes
