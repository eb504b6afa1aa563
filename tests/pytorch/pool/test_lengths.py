"""olla.pool where batches are of many lengths: one plan serves all that are no longer than the longest seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla
from olla.layout.requests import Trace

torch = pytest.importorskip("torch")
from olla.pytorch.memory.pattern import Pattern, repeated  # noqa: E402
from olla.pytorch.memory.replay import Iteration  # noqa: E402
from tests.support.pytorch.steps import Loop, equal  # noqa: E402

pytestmark = pytest.mark.torch


def cut(loop: Loop, length: int) -> dict[str, torch.Tensor]:
    """Return the batch of a loop with so many tokens."""
    return {name: tensor[:, :length].clone() for name, tensor in loop.batch.items()}


def lengths(loop: Loop, num: int, seed: int = 0) -> list[int]:
    longest = next(iter(loop.batch.values())).shape[1]
    return np.random.default_rng(seed).integers(longest // 2, longest, num, endpoint=True).tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_random_lengths_are_served_by_one_kind_to_the_bit(optimizer: str) -> None:
    stock = Loop("gpt2", optimizer)
    pooled = stock.copy()
    chosen = lengths(stock, 60)
    torch.manual_seed(1)
    for length in chosen:
        stock.iterate(cut(stock, length))
    torch.manual_seed(1)
    with olla.pool() as pool:
        for length in chosen:
            pooled.iterate(cut(pooled, length))
            pool.step()
    assert equal(stock, pooled)
    report = pool.report()
    assert len(pool._kinds) == 1
    assert report.served > 0.9
    assert report.num_planned >= 57
    assert report.arena_bytes <= 1.005 * report.load_bytes


def test_lengths_that_rise_for_ever_are_not_planned_at_every_step() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    with olla.pool() as pool:
        for i in range(200):
            model.zero_grad()
            model(torch.ones(8 + i, 16)).square().mean().backward()
            pool.step()
    report = pool.report()
    assert report.num_plans <= 12
    assert len(pool._kinds) == 1


def test_two_programs_of_as_many_requests_are_two_kinds() -> None:
    """One frees a block that the other keeps: their sizes say nothing about each other."""

    def run(keep: bool) -> None:
        first = torch.ones(1000)
        if not keep:
            del first
        _second = torch.ones(2000 if keep else 3000)

    with olla.pool() as pool:
        for i in range(12):
            run(i % 2 == 0)
            pool.step()
    assert len(pool._kinds) == 2
    assert pool.report().num_plans == 2


def iteration(num_bytes: list[int], freed_at: list[int], start: int) -> Iteration:
    freed = np.array(freed_at)
    return Iteration(start, np.array(num_bytes), freed >= 0, np.where(freed >= 0, freed + start, -1))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_pattern_has_room_for_every_iteration_it_came_from(data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 8))
    freed = [data.draw(st.integers(k + 1, m) | st.just(-1)) for k in range(m)]
    sizes = st.lists(st.integers(1, 500), min_size=m, max_size=m)
    seen = data.draw(st.lists(sizes, min_size=2, max_size=5))
    found = repeated(iteration(seen[0], freed, 0), iteration(seen[1], freed, m), same_sizes=False)
    assert found is not None
    for later in seen[2:]:
        assert found.is_like(iteration(later, freed, 7 * m))
        found = found.with_sizes(np.array(later))
    for each in seen:
        assert np.all(found.least <= each)
        assert np.all(found.trace.num_bytes >= each)
    assert found.trace.num_bytes.tolist() == np.max(seen, axis=0).tolist()
    fixed = np.all(np.array(seen) == seen[0], axis=0)
    assert np.array_equal(found.least == found.trace.num_bytes, fixed | (found.trace.num_bytes == 1))
    placed = found.trace.place(64, 0.5, 0)
    for i in range(m):
        for j in range(i):
            if max(placed.lower[i], placed.lower[j]) < min(placed.upper[i], placed.upper[j]):
                ends = placed.offsets + found.trace.num_bytes
                assert ends[i] <= placed.offsets[j] or ends[j] <= placed.offsets[i]


def test_sizes_that_do_not_rise_together_would_waste_memory() -> None:
    trace = Trace(np.array([1000, 1000]), np.array([2, 2]))
    pattern = Pattern(trace, np.array([True, True]), np.array([1, 1]))
    assert not pattern.is_compact(64, np.array([1000, 10]), np.array([10, 1000]))
    assert pattern.is_compact(64, np.array([1000, 1000]), np.array([10, 10]))
