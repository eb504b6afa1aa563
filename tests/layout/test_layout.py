"""Layouts against definitions: an independent O(n^2) check, and brute force over all orders."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla.errors import PlanError
from olla.layout import Layout, LayoutOptions, place, read_buffers
from olla.layout.layout import layout
from tests.support.buffers import generate
from tests.support.overlap import overlapping
from tests.support.samples import SHARED

Buffer = tuple[int, int, int]  # lower, upper, size


def solve(buffers: list[Buffer], **options: object) -> Layout:
    lower, upper, size = (
        (np.array(column, dtype=np.int64) for column in zip(*buffers, strict=True)) if buffers else ([],) * 3
    )
    result = layout(lower, upper, size, **options)  # type: ignore[arg-type]
    check(buffers, result, int(options.get("alignment", 1)))  # type: ignore[call-overload]
    return result


def is_alive(buffer: Buffer) -> bool:
    return buffer[0] < buffer[1] and buffer[2] > 0


def rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def check(buffers: list[Buffer], result: Layout, alignment: int) -> None:
    """The definition of a layout, pair by pair; shares nothing with the planner."""
    offsets = result.offsets.tolist()
    assert len(offsets) == len(buffers)
    assert all(offset >= 0 and offset % alignment == 0 for offset in offsets)
    placed = [
        (a, b, rounded(s, alignment), o) for (a, b, s), o in zip(buffers, offsets, strict=True) if a < b and s > 0
    ]
    for (a, b, s, o), (a2, b2, s2, o2) in itertools.combinations(placed, 2):
        assert b <= a2 or b2 <= a or o + s <= o2 or o2 + s2 <= o
    load = max((sum(s2 for a2, b2, s2, _ in placed if a2 <= a < b2) for a, *_ in placed), default=0)
    assert result.load_bytes == load
    assert result.height_bytes == max((s + o for *_, s, o in placed), default=0)
    assert result.height_bytes >= load
    assert load <= result.bound_bytes <= result.height_bytes
    assert (result.status == "optimal") == (result.height_bytes == result.bound_bytes)


def brute_force(buffers: list[Buffer], alignment: int) -> int:
    """Every order of the buffers, each buffer at the lowest free offset: one of them gives the least height."""
    alive = [(a, b, rounded(s, alignment)) for a, b, s in buffers if a < b and s > 0]
    best = sum(s for *_, s in alive)
    for order in itertools.permutations(alive):
        placed: list[tuple[int, int, int, int]] = []
        height = 0
        for a, b, s in order:
            offset = 0
            for start, end in sorted((o, o + s2) for a2, b2, s2, o in placed if a < b2 and a2 < b):
                if start - offset >= s:
                    break
                offset = max(offset, end)
            placed.append((a, b, s, offset))
            height = max(height, offset + s)
            if height >= best:
                break
        best = min(best, height)
    return best


def lifetimes(horizon: int, max_size: int) -> st.SearchStrategy[Buffer]:
    times = st.integers(-horizon, horizon)
    return st.tuples(times, times, st.integers(0, max_size)).map(lambda row: (*sorted(row[:2]), row[2]))  # type: ignore[arg-type,return-value]


@given(st.lists(lifetimes(20, 100), max_size=40), st.sampled_from([1, 2, 8, 512]))
@settings(max_examples=150, deadline=None)
def test_buffers_alive_together_never_overlap(buffers: list[Buffer], alignment: int) -> None:
    solve(buffers, alignment=alignment)


@given(st.lists(lifetimes(20, 100), min_size=1, max_size=8), st.data())
@settings(max_examples=50, deadline=None)
def test_a_buffer_that_ends_before_it_begins_is_an_error_naming_it(buffers: list[Buffer], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(buffers) - 1))
    lower, _, size = buffers[i]
    buffers[i] = lower, lower - data.draw(st.integers(1, 50)), size
    with pytest.raises(
        PlanError, match=rf"buffer {i} is alive from lower = {lower} to upper = {buffers[i][1]};"
    ) as caught:
        solve(buffers)
    assert (caught.value.rule, caught.value.ids) == ("lifetimes", (i,))


@given(st.lists(lifetimes(4, 9), max_size=6), st.sampled_from([1, 4]))
@settings(max_examples=150, deadline=None)
def test_height_equals_brute_force(buffers: list[Buffer], alignment: int) -> None:
    result = solve(buffers, alignment=alignment)
    assert result.height_bytes == result.bound_bytes == brute_force(buffers, alignment)


def test_height_equals_brute_force_with_seven_buffers() -> None:
    draw = random.Random(7)
    for _ in range(25):
        buffers = []
        for _ in range(7):
            lower = draw.randrange(8)
            buffers.append((lower, lower + draw.randrange(1, 6), draw.randrange(1, 20)))
        assert solve(buffers).height_bytes == brute_force(buffers, 1)


@given(st.lists(lifetimes(15, 50), min_size=1, max_size=30), st.integers(-(10**12), 10**12))
@settings(max_examples=60, deadline=None)
def test_doubled_sizes_double_the_height_and_shifted_times_change_nothing(buffers: list[Buffer], shift: int) -> None:
    result = solve(buffers)
    doubled = solve([(a, b, 2 * s) for a, b, s in buffers])
    assert doubled.height_bytes == 2 * result.height_bytes
    assert np.array_equal(solve([(a + shift, b + shift, s) for a, b, s in buffers]).offsets, result.offsets)


# Load 13, but whichever way the first two leave room for each other, the last two do not.
ABOVE_LOAD = [(0, 2, 5), (1, 3, 5), (2, 4, 4), (2, 5, 4), (3, 5, 4), (4, 8, 5), (6, 9, 5)]


def test_a_height_above_the_load_is_proved_optimal() -> None:
    result = solve(ABOVE_LOAD)
    assert brute_force(ABOVE_LOAD, 1) == 14
    assert (result.height_bytes, result.bound_bytes, result.load_bytes, result.status) == (14, 14, 13, "optimal")


def above_load_buffers() -> list[Buffer]:
    return [*((a, b, 100 * s) for a, b, s in ABOVE_LOAD), (0, 20, 1), *((9 + i // 20, 20, 1) for i in range(200))]


def endless_buffers() -> list[Buffer]:
    """No layout reaches the load, and they are too many to prove it: only its limits end the search."""
    copies = [(a + 20 * k, b + 20 * k, 100 * s) for k in range(120) for a, b, s in ABOVE_LOAD]
    return [*copies, (0, 20 * 120, 1)]


def test_a_height_above_the_load_is_proved_least() -> None:
    result = solve(above_load_buffers(), time_limit=100.0)
    assert (result.load_bytes, result.height_bytes, result.status) == (1301, 1401, "optimal")


def test_a_capacity_that_cannot_be_met_is_proved_so() -> None:
    result = solve(above_load_buffers(), time_limit=100.0, capacity=1400)
    assert result.bound_bytes > 1400


@pytest.mark.parametrize("seed", [0, 4])
def test_a_capacity_is_asked_of_more_than_the_exact_search(seed: int) -> None:
    """Where that alone finds no answer within its nodes, others may."""
    made = generate("tight", 400, seed)
    capacity = made.load_bytes + made.load_bytes // 50
    options = LayoutOptions(capacity=capacity, max_placements=200_000, max_nodes=20_000)
    found = place(made.lower, made.upper, made.size, options, 60.0)
    assert found.height_bytes <= capacity
    assert overlapping(made.lower, made.upper, made.size, found.offsets) < 0


def test_the_same_seed_gives_the_same_offsets() -> None:
    buffers = random_buffers(80)
    first, second = (solve(buffers, seed=5, time_limit=100.0) for _ in range(2))
    assert np.array_equal(first.offsets, second.offsets)


# Generated sets. Each is drawn anew from its seed: nothing is tuned to one of them.


def random_buffers(count: int, seed: int = 0) -> list[Buffer]:
    draw = random.Random(seed)
    lowers = [draw.randrange(2 * count) for _ in range(count)]
    return [(a, a + 1 + int(count ** draw.random()), int(2 ** (5 + 15 * draw.random()))) for a in lowers]


def training_buffers(count: int, seed: int) -> list[Buffer]:
    """Nested activations, temporaries, and gradients that live until the update at the end."""
    draw = random.Random(seed)
    shapes = [draw.randrange(1, 65) << draw.randrange(4, 18) for _ in range(12)]
    layers = count // 5
    buffers = []
    for i in range(layers):
        back, size = 2 * layers - 1 - i, draw.choice(shapes)
        buffers.append((i, back + 1, size))
        buffers.append((i, i + 1 + draw.randrange(3), draw.choice(shapes)))
        buffers.append((back, back + 2, size))
        buffers.append((back, back + 1, draw.choice(shapes)))
        buffers.append((back, 2 * layers + i // 3 + 2, draw.choice(shapes)))
    return buffers


def pipeline_buffers(num_batches: int, depth: int, per_batch: int, seed: int) -> list[Buffer]:
    """One stage of a 1F1B pipeline: `depth` batches in flight, each with its activations and its temporaries."""
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 17) * draw.randrange(1000, 90000) for _ in range(per_batch)]
    schedule = [("forward", i) for i in range(depth)]
    for i in range(num_batches):
        schedule.append(("backward", i))
        if depth + i < num_batches:
            schedule.append(("forward", depth + i))
    begin = {}
    buffers = []
    for slot, (phase, batch) in enumerate(schedule):
        for j in range(per_batch):
            now = slot * per_batch + j
            if phase == "forward":
                begin[batch, j] = now
                buffers.append((now, now + 1 + draw.randrange(2), sizes[j] // 2))
            else:
                buffers.append((begin[batch, per_batch - 1 - j], now + 1, sizes[per_batch - 1 - j]))
    return buffers


@pytest.mark.parametrize("count", [100, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_training_steps_are_within_a_thousandth_of_their_load(count: int, seed: int) -> None:
    result = solve(training_buffers(count, seed), alignment=512)
    assert result.height_bytes <= 1.001 * result.load_bytes


@pytest.mark.parametrize("seed", range(3))
def test_pipelines_and_random_lifetimes_stay_close_to_their_load(seed: int) -> None:
    for buffers in (pipeline_buffers(12, 4, 8, seed), random_buffers(500, seed)):
        result = solve(buffers, alignment=512, time_limit=1.0)
        assert result.height_bytes <= 1.1 * result.load_bytes


def test_a_hundred_thousand_buffers_take_seconds() -> None:
    lower, upper, size = np.array(training_buffers(100_000, 1), dtype=np.int64).T.copy()
    start = time.perf_counter()
    result = layout(lower, upper, size, alignment=512, time_limit=5.0)
    assert time.perf_counter() - start < 20.0
    assert result.height_bytes <= 1.001 * result.load_bytes


def test_the_time_limit_is_kept() -> None:
    result = solve(random_buffers(1500), time_limit=0.3)
    assert result.seconds < 3.0


def test_without_any_time_there_is_still_a_layout() -> None:
    solve(random_buffers(300), time_limit=0.0)


def test_progress_can_stop_the_search() -> None:
    calls = []

    def progress(stage: str, seconds: float, value: int, bound: int) -> bool:
        calls.append((stage, seconds, value, bound))
        return False

    result = solve(endless_buffers(), progress=progress, time_limit=60.0)
    assert result.cancelled
    assert len(calls) == 1
    stage, seconds, value, bound = calls[0]
    assert stage == "layout"
    assert seconds >= 0.0
    assert value >= bound == result.load_bytes


def test_an_error_in_progress_reaches_the_caller() -> None:
    def progress(*_: object) -> bool:
        raise KeyError("stop here")

    with pytest.raises(KeyError, match="stop here"):
        solve(endless_buffers(), progress=progress, time_limit=60.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1], [-1]), "buffer 0 has size -1"),
        (([0, 0], [1, 1], [2**62, 1]), "buffer 1 .*2\\^62"),
        (([0], [1], [2**63]), "size has values of type uint64"),
        (([0], [1], [1.5]), "size has values of type float64"),
        (([0, 1], [1], [1]), "equally long"),
        (([[0]], [1], [1]), "lower has 2 dimensions"),
        (([2**70], [1], [1]), "lower has values of type object"),
    ],
)
def test_wrong_buffers_are_rejected(arguments: tuple[list[int], list[int], list[int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layout(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"alignment": 0},
        {"capacity": 0},
        {"num_threads": 0},
        {"time_limit": -1.0},
        {"time_limit": float("nan")},
        {"seed": -1},
    ],
)
def test_wrong_options_are_rejected(options: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=next(iter(options))):
        layout([0], [1], [1], **options)  # type: ignore[arg-type]


def test_overflowing_sizes_name_their_buffer() -> None:
    with pytest.raises(PlanError) as caught:
        layout([0, 0], [1, 1], [2**62 - 1, 2], alignment=512)
    assert caught.value.rule == "sizes"
    assert caught.value.ids == (1,)


HARD = sorted((SHARED / "layouts").glob("*.csv"))


@pytest.mark.skipif(
    not HARD, reason="needs the public layout instances: set OLLA_SHARED to the folder that holds layouts/"
)
@pytest.mark.parametrize("path", HARD, ids=lambda path: path.stem)
def test_hard_public_instances_fit_their_capacity(path: Path) -> None:
    buffers = read_buffers(path)
    rows = list(zip(buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), strict=True))
    capacity = int(path.suffixes[0][1:])  # as in A.1048576.csv
    assert solve(rows, capacity=capacity, time_limit=60.0).height_bytes <= capacity


def test_what_the_core_answers_cannot_be_changed_and_its_options_have_names() -> None:
    columns = [np.array(column, dtype=np.int64) for column in ([0, 0, 1], [1, 2, 2], [4, 8, 2])]
    found = place(*columns, LayoutOptions(alignment=4, use_squeaky_wheel=False), 1.0)
    assert (found.height_bytes, found.load_bytes, found.bound_bytes, found.cancelled) == (12, 12, 12, False)
    with pytest.raises(AttributeError):
        found.height_bytes = 11  # type: ignore[misc]
    with pytest.raises(TypeError, match="use_squeaky_wheel"):
        LayoutOptions(use_magic=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LayoutOptions(4)  # type: ignore[misc]
