"""Plans that swap: files, host memory, decisions, and what they cost beside recomputation alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import olla
from olla.check.swapped import check_swaps
from olla.errors import BudgetError, PlanError
from olla.graph import Graph, profile_of, rules
from olla.plan import Link, Plan
from olla.plan.recomputed import Decision
from olla.plan.swapped import SwapDecision
from olla.recompute import search, starts
from olla.rewriting import needed_bytes
from olla.swap import combine
from olla.swap.bound import working_sets
from tests.support.generate import random_graph
from tests.support.swaps import SLOW, chain
from tests.support.training import LanguageModel, training_chain


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
    between = plan.chunked.graph
    of_chunks = {"source_digest": between.digest, "program_peak_bytes": between.program_peak_bytes}
    olla.check(between, replace(unchunked, **of_chunks))


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
    works = {starts: ("_DROP_WORK",), search: ("_IMPROVE_WORK",), combine: ("_SWAP_WORK", "_TURN_WORK")}
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
