"""The address program against brute force over all layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from olla._core import AddressIlpResult
from olla.errors import PlanError
from olla.ilp import address_ilp
from tests.support import oracle
from tests.support.strategies import buffers

# Full at every step with 6 bytes, and no layout of 6 bytes holds them.
TIGHT = ([0, 0, 1, 1, 2, 2, 3, 4], [1, 2, 3, 4, 3, 4, 5, 5], [3, 3, 2, 1, 1, 2, 3, 3])


def int64(values: ArrayLike) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def solve(lower: ArrayLike, upper: ArrayLike, size: ArrayLike, alignment: int = 1, **options: Any) -> AddressIlpResult:
    """Run the program and check all that holds of every answer."""
    low, up, sizes = int64(lower), int64(upper), int64(size)
    result = address_ilp(low, up, sizes, alignment=alignment, **options)
    rounded = -(-sizes // alignment) * alignment
    alive = np.flatnonzero((low < up) & (sizes > 0))
    assert result.height_bytes == max((result.offsets[i] + rounded[i] for i in alive), default=0)
    for i in alive:
        assert result.offsets[i] % alignment == 0
        for j in alive[alive < i]:
            together = low[i] < up[j] and low[j] < up[i]
            below = result.offsets[i] + rounded[i] <= result.offsets[j]
            assert not together or below or result.offsets[j] + rounded[j] <= result.offsets[i]
    assert result.load_bytes <= result.lower_bound_bytes <= result.height_bytes
    assert (result.status == "optimal") == (result.lower_bound_bytes == result.height_bytes)
    return result


def test_a_height_above_the_load_is_proved_to_be_least() -> None:
    result = solve(*TIGHT)
    assert (result.load_bytes, result.height_bytes, result.status) == (6, 7, "optimal")
    assert result.figures.num_columns


@settings(max_examples=60, deadline=None)
@given(case=buffers(), alignment=st.sampled_from([1, 4]))
def test_least_height_equals_brute_force(case: tuple[list[int], list[int], list[int]], alignment: int) -> None:
    lower, upper, size = case
    result = solve(lower, upper, size, alignment)
    assert result.status == "optimal"
    assert result.height_bytes == oracle.best_height(lower, upper, [-(-s // alignment) * alignment for s in size])


@settings(max_examples=40, deadline=None)
@given(noise=st.lists(st.integers(0, 2), min_size=8, max_size=8), scale=st.integers(1, 6))
def test_least_height_equals_brute_force_on_tight_buffers(noise: list[int], scale: int) -> None:
    lower, upper, size = TIGHT
    size = [scale * s + extra for s, extra in zip(size, noise, strict=True)]
    result = solve(lower, upper, size)
    assert result.height_bytes == oracle.best_height(lower, upper, size)


@settings(max_examples=40, deadline=None)
@given(case=buffers(max_buffers=5), data=st.data())
def test_fixed_buffers_keep_their_offsets(case: tuple[list[int], list[int], list[int]], data: st.DataObject) -> None:
    lower, upper, size = case
    if not size:
        return
    chosen = data.draw(st.integers(0, len(size) - 1))
    fixed = int64([-1] * len(size))
    fixed[chosen] = data.draw(st.integers(0, 30))
    result = solve(lower, upper, size, fixed=fixed)
    assert result.offsets[chosen] == fixed[chosen]
    assert result.status == "optimal"
    # No layout with one buffer fixed is lower than the best free one, nor higher than all on top of it.
    assert result.height_bytes >= oracle.best_height(lower, upper, size)
    assert result.height_bytes <= max(fixed[chosen], 0) + sum(size)


def test_sizes_that_share_a_divisor_make_the_same_program() -> None:
    lower, upper, size = TIGHT
    small, large = solve(lower, upper, size), solve(lower, upper, [s << 30 for s in size])
    assert large.height_bytes == small.height_bytes << 30
    assert (large.figures.num_columns, large.figures.num_rows) == (small.figures.num_columns, small.figures.num_rows)


def test_a_start_that_meets_the_bound_needs_no_program() -> None:
    best = solve(*TIGHT)
    again = solve(*TIGHT, start=best.offsets, lower_bound_bytes=7)
    assert (again.status, again.figures.num_columns) == ("optimal", 0)


def test_sizes_too_far_apart_for_floating_point_give_the_start_back() -> None:
    lower, upper, size = TIGHT
    result = solve(lower, upper, [(s << 40) + 1 for s in size])
    assert result.status == "feasible"
    assert "not built" in result.figures.message


def test_without_time_the_first_fit_comes_back() -> None:
    result = solve(*TIGHT, time_limit=0.0)
    assert result.status == "feasible"
    assert "time limit" in result.figures.message


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"fixed": int64([0])}, "lengths"),
        ({"start": int64([0, 0, 0, 0, 0, 0, 0, 0])}, "start"),
        ({"fixed": int64([-2, -1, -1, -1, -1, -1, -1, -1])}, "fixed"),
    ],
)
def test_invalid_input_is_named(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(PlanError) as caught:
        solve(*TIGHT, **options)
    assert caught.value.rule == rule


def test_an_error_in_the_progress_callback_comes_through() -> None:
    def fail(*_: Any) -> bool:
        raise LookupError("no such display")

    rng = np.random.default_rng(3)
    lower = rng.integers(0, 40, 120)
    upper, size = lower + rng.integers(3, 30, 120), rng.integers(1, 1000, 120)
    with pytest.raises(LookupError, match="no such display"):
        address_ilp(int64(lower), int64(upper), int64(size), time_limit=30.0, progress=fail)
