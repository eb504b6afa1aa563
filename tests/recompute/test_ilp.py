"""The choice of drops by integer program: against everything tried, against the greedy, and as a method of `plan`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla import Graph, _core, planner
from olla.graph import Rules
from olla.graph.operators import without_replays
from olla.plan import Goal, Options, Request
from olla.recompute.ilp import proof, solve_choice
from tests.support.budget_oracle import Permissions, evictor, least_added_seconds, tiny
from tests.support.training import training_chain


@settings(max_examples=40, deadline=None)
@given(tiny(max_ops=5), st.floats(0.0, 1.0))
def test_no_choice_beats_everything_tried_and_none_is_worse_than_the_greedy(
    case: tuple[Graph, Permissions], share: float
) -> None:
    graph, allowed = case
    greedy = evictor(graph, allowed)
    greedy.run(0, math.inf, _core.Limits(time_limit=10.0, max_work=None, progress=None))
    search = evictor(graph, allowed)
    peak = round(greedy.peak + share * (search.peak - greedy.peak))
    search.run(peak, math.inf, _core.Limits(time_limit=10.0, max_work=None, progress=None))
    before = search.added_seconds if search.peak <= peak else math.inf
    found = solve_choice(search, peak_bytes=peak, time_limit=20.0)
    assert found.status == "optimal"
    assert search.peak <= peak
    assert least_added_seconds(graph, allowed, peak) <= search.added_seconds + 1e-9
    assert search.added_seconds <= before + 1e-9
    assert found.bound == pytest.approx(search.added_seconds, abs=1e-5)
    lowest = evictor(graph, allowed)
    least = solve_choice(lowest, peak_bytes=0, added_seconds=search.added_seconds, time_limit=20.0)
    assert least.status == "optimal"
    assert lowest.peak <= search.peak


def test_the_method_ilp_proves_the_choice_for_the_base_order() -> None:
    graph = training_chain(4)
    base = olla.plan(graph, time_limit=2.0).peak_bytes
    goal = Goal.of(int(0.8 * base), None, None, "a100", True, True)
    assert goal is not None

    def restrict(rules: Rules, chunked: object) -> Rules:
        return without_replays(rules)  # the program repeats no draws

    greedy = planner.run(Request(graph=graph, options=Options(layout=False), goal=goal, restrict=restrict))
    exact = olla.plan(graph, budget=int(0.8 * base), method="ilp", time_limit=20.0, layout=False)
    assert exact.added_seconds_lower_bound <= exact.added_seconds <= greedy.added_seconds + 1e-12
    (line,) = [line for line in exact.details if line.startswith("budget program")]
    assert "values idle above the target" in line
    assert "any values" not in line
    olla.check(graph, exact)


def test_the_least_peak_within_a_time_is_searched_for_too() -> None:
    graph = training_chain(4)
    exact = olla.plan(graph, max_slowdown=0.1, method="ilp", time_limit=20.0, layout=False)
    assert exact.slowdown <= 0.1 + 1e-9
    assert any(line.startswith("budget program: ") and "peak" in line for line in exact.details)
    olla.check(graph, exact)


def test_what_nothing_fits_is_said_to_be_proved() -> None:
    graph = training_chain(2)
    order = np.arange(graph.num_ops, dtype=np.int32)
    r = olla.graph.rules(graph, olla.graph.PROFILES["a100"])
    search = r.evictor(graph, order)
    found = solve_choice(search, peak_bytes=1_500_000, time_limit=20.0)
    assert found.status == "infeasible"
    assert "nothing fits" in proof(found, least_time=True)
    assert search.added_seconds == 0.0
