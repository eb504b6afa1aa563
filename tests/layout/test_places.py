"""Fixed and preferred offsets, against brute force and by definition."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla.errors import PlanError
from olla.layout import Layout
from olla.layout.layout import layout
from tests.support import buffers
from tests.support.overlap import highest_end, overlapping

Placed = tuple[int, int, int, int]  # lower, upper, size, offset: -1 where it is free


def solve(problem: list[Placed], *, fixed: bool = True, **options: int) -> Layout:
    """Lay out with the offsets as fixed or as preferred ones; check for overlap, and that fixed ones are kept."""
    lower, upper, size, offset = np.array(problem, dtype=np.int64).reshape(-1, 4).T.copy()
    given_offsets = {"fixed" if fixed else "preferred": offset}
    result = layout(lower, upper, size, **given_offsets, **options)  # type: ignore[arg-type]
    alignment = options.get("alignment", 1)
    rounded = -(-size // alignment) * alignment
    assert overlapping(lower, upper, rounded, result.offsets) == -1
    assert highest_end(lower, upper, rounded, result.offsets) == result.height_bytes
    assert (result.offsets % alignment == 0).all()
    assert result.load_bytes <= result.bound_bytes <= result.height_bytes
    if fixed:
        assert np.array_equal(result.offsets[offset >= 0], offset[offset >= 0])
    return result


def collide(a: Placed, b: Placed) -> bool:
    together = a[0] < b[1] and b[0] < a[1] and a[2] > 0 and b[2] > 0 and a[0] < a[1] and b[0] < b[1]
    return together and a[3] < b[3] + b[2] and b[3] < a[3] + a[2]


def least_height(problem: list[Placed]) -> int:
    """Every order of the free buffers, each at the lowest free offset: one of them gives the least height."""
    alive = [b for b in problem if b[0] < b[1] and b[2] > 0]
    fixed = [b for b in alive if b[3] >= 0]
    best = sum(b[2] for b in alive) + max((b[3] + b[2] for b in fixed), default=0)
    for order in itertools.permutations(b for b in alive if b[3] < 0):
        placed = list(fixed)
        for a, b, s, _ in order:
            ends = [p[3] + p[2] for p in placed]
            offset = next(o for o in sorted({0, *ends}) if not any(collide((a, b, s, o), p) for p in placed))
            placed.append((a, b, s, offset))
        best = min(best, max((p[3] + p[2] for p in placed), default=0))
    return best


def random_problem(seed: int, count: int, num_fixed: int, horizon: int = 8, max_size: int = 9) -> list[Placed]:
    """Draw buffers, of which the last ones have offsets that do not collide."""
    draw = random.Random(seed)
    problem: list[Placed] = []
    while len(problem) < count:
        lower = draw.randrange(horizon)
        offset = draw.randrange(3 * max_size) if len(problem) >= count - num_fixed else -1
        new = (lower, lower + draw.randint(1, horizon // 2), draw.randint(1, max_size), offset)
        if offset < 0 or not any(collide(new, old) for old in problem if old[3] >= 0):
            problem.append(new)
    return problem


@pytest.mark.parametrize("seed", range(60))
def test_height_around_fixed_buffers_is_the_least_one(seed: int) -> None:
    problem = random_problem(seed, 7, 1 + seed % 4)
    result = solve(problem)
    exact = least_height(problem)
    assert result.bound_bytes <= exact
    assert result.height_bytes == exact


spans = st.tuples(st.integers(-15, 15), st.integers(-15, 15)).map(sorted)
places = st.tuples(spans, st.integers(0, 40), st.integers(-1, 60)).map(lambda row: (*row[0], *row[1:]))


@given(st.lists(places, max_size=30), st.sampled_from([1, 4]))
@settings(max_examples=150, deadline=None)
def test_fixed_offsets_are_kept_or_their_collision_is_named(problem: list[Placed], alignment: int) -> None:
    problem = [(a, b, s, o if o < 0 else o * alignment) for a, b, s, o in problem]
    rounded = [(a, b, -(-s // alignment) * alignment, o) for a, b, s, o in problem]
    fixed = [b for b in rounded if b[3] >= 0]
    if not any(collide(a, b) for a, b in itertools.combinations(fixed, 2)):
        solve(problem, alignment=alignment, time_limit=1)
        return
    with pytest.raises(PlanError, match="collide") as caught:
        solve(problem, alignment=alignment)
    i, j = caught.value.ids
    assert i < j
    assert rounded[i][3] >= 0 <= rounded[j][3]
    assert collide(rounded[i], rounded[j])


@given(st.lists(places, max_size=30), st.sampled_from([1, 4]))
@settings(max_examples=100, deadline=None)
def test_preferred_offsets_cost_no_height(problem: list[Placed], alignment: int) -> None:
    problem = [(a, b, s, o if o < 0 else o * alignment) for a, b, s, o in problem]
    free = solve([(a, b, s, -1) for a, b, s, _ in problem], alignment=alignment)
    assert solve(problem, fixed=False, alignment=alignment).height_bytes <= free.height_bytes


def test_the_offsets_of_a_layout_are_all_kept_when_they_are_preferred_or_fixed() -> None:
    for seed in range(3):
        made = buffers.generate("training", 500, seed)
        first = layout(made.lower, made.upper, made.size, seed=seed)
        for options in ({"preferred": first.offsets}, {"fixed": first.offsets}):
            again = layout(made.lower, made.upper, made.size, seed=seed + 1, **options)  # type: ignore[arg-type]
            assert np.array_equal(again.offsets, first.offsets)


def test_a_preference_that_is_free_is_honoured_though_another_one_cannot_be() -> None:
    # The first two would both like to be at 4; the third, alone at its time, at 6.
    problem = [(0, 2, 4, 4), (0, 2, 4, 4), (3, 4, 2, 6)]
    offsets = solve(problem, fixed=False).offsets.tolist()
    assert sorted(offsets[:2]) == [0, 4]
    assert offsets[2] == 6


@pytest.mark.parametrize("family", ["training", "pipeline", "random"])
def test_weights_fixed_at_the_bottom_of_a_step_leave_it_its_height(family: str) -> None:
    made = buffers.generate(family, 1000, 0)
    horizon = int(made.upper.max())
    weights = np.full(20, 4096, dtype=np.int64)
    lower = np.concatenate([made.lower, np.zeros(20, np.int64)])
    upper = np.concatenate([made.upper, np.full(20, horizon)])
    fixed = np.concatenate([np.full(made.num_buffers, -1), np.arange(20) * 4096])
    result = layout(lower, upper, np.concatenate([made.size, weights]), fixed=fixed, time_limit=5.0)
    assert overlapping(lower, upper, np.concatenate([made.size, weights]), result.offsets) == -1
    assert np.array_equal(result.offsets[-20:], np.arange(20) * 4096)
    assert result.height_bytes <= 1.005 * result.load_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed": [4, -1]}, "buffer 0 has fixed offset 4, expected -1 or a multiple of the alignment, 8"),
        ({"preferred": [-1, -2]}, "buffer 1 has preferred offset -2"),
        ({"fixed": [2**62, -1]}, "buffer 0 has fixed offset 4611686018427387904"),
        ({"fixed": [8, 8]}, r"fixed offsets collide: buffer 0 at \[8, 16\) and buffer 1 at \[8, 24\)"),
        ({"fixed": [0]}, "equally long"),
        ({"preferred": [0.5, 1.0]}, "preferred has values of type float64"),
    ],
)
def test_offsets_that_cannot_be_are_rejected(options: dict[str, list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layout([0, 1], [2, 3], [8, 10], alignment=8, **options)  # type: ignore[arg-type]
