"""Traces of iterations: lifetimes that cross iterations, their load, and places that hold in a long run."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olla.layout.requests import NEVER, Placed, Trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    m = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 300), min_size=m, max_size=m))
    freed = [draw(st.one_of(st.just(NEVER), st.integers(k + 1, k + 2 * m))) for k in range(m)]
    freed = [f if f < 2 * m else NEVER for f in freed]
    return Trace(np.array(sizes, dtype=np.int64), np.array(freed, dtype=np.int64))


def alive(trace: Trace, num_iterations: int) -> list[list[tuple[int, int]]]:
    """(iteration, request) of all blocks of planned requests alive right after each request of a long run."""
    m = trace.num_requests
    result: list[list[tuple[int, int]]] = [[] for _ in range(num_iterations * m)]
    for i in range(num_iterations):
        for k in np.flatnonzero(trace.planned).tolist():
            for t in range(i * m + k, min(i * m + int(trace.freed_at[k]), len(result))):
                result[t].append((i, k))
    return result


@given(traces())
def test_the_load_is_that_of_a_long_run(trace: Trace) -> None:
    size = -(-trace.num_bytes // 64) * 64
    most = max((sum(int(size[k]) for _, k in now) for now in alive(trace, 4)), default=0)
    assert trace.load_bytes(64) == most


@given(traces())
def test_places_never_overlap_in_a_long_run(trace: Trace) -> None:
    placed = trace.place(64, 1.0, 0)
    assert np.array_equal(placed.offsets >= 0, trace.planned)
    assert placed.arena_bytes >= placed.load_bytes == trace.load_bytes(64)
    for now in alive(trace, 4):
        blocks = sorted((int(placed.offsets[k]), int(trace.num_bytes[k])) for _, k in now)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(blocks))


@given(traces())
def test_requests_that_outlive_their_next_are_not_planned(trace: Trace) -> None:
    span = trace.freed_at - np.arange(trace.num_requests)
    assert not np.any(trace.planned & (span > trace.num_requests))


def test_time_begins_where_least_is_alive() -> None:
    # Requests 1 and 2 are freed after request 0 of the next iteration: the moment after that crosses 10 bytes only.
    trace = Trace(np.array([10, 1000, 1000]), np.array([3, 4, 4]))
    lower, upper = trace.lifetimes()
    assert (lower.tolist(), upper.tolist()) == ([0, 0, 1], [3, 3, 3])
    assert trace.place(1, 1.0, 0).arena_bytes == trace.load_bytes(1) == 2010


def test_a_placed_trace_has_the_arena_of_its_largest_end() -> None:
    zeros = np.zeros(2, dtype=np.int64)
    placed = Placed(np.array([100, 7]), zeros, zeros + 1, np.array([64, -1]), 64, 128)
    assert placed.arena_bytes == 192
