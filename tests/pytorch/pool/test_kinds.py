"""olla.pool where iterations are of several kinds: each has its plan, whatever the order in which they come."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import olla
from olla.layout.requests import Trace

torch = pytest.importorskip("torch")
from olla.pytorch import kinds  # noqa: E402
from tests.support.pytorch.steps import Loop, equal, halved  # noqa: E402

pytestmark = pytest.mark.torch

ORDERS: dict[str, Callable[[int], str]] = {
    "alternating": lambda i: "AB"[i % 2],
    "short last batch": lambda i: "AAAAAAAAAB"[i % 10],
    "train and eval": lambda i: "AAAAAAAAEE"[i % 10],
    "eval first": lambda i: "EEAAAAAAAA"[i % 10],
    "irregular": lambda i: random.Random(i).choice("ABE"),
}


def iterate(loop: Loop, kind: str, zero_grad: str = "start") -> None:
    """Run an iteration on a batch (A), on a smaller one (B), or an evaluation (E)."""
    batch = halved(loop.batch) if kind == "B" else loop.batch
    if kind == "E":
        with torch.no_grad():
            loop.losses.append(loop.loss(loop.model.eval(), batch).item())
        loop.model.train()
        return
    if zero_grad == "start":
        loop.optimizer.zero_grad()
    loss = loop.loss(loop.model, batch)
    loss.backward()
    loop.optimizer.step()
    if zero_grad == "end":
        loop.optimizer.zero_grad()
    loop.losses.append(loss.item())


@pytest.mark.parametrize("zero_grad", ["start", "end"])
@pytest.mark.parametrize("order", ORDERS)
def test_kinds_of_iterations_each_get_a_plan_once_and_share_the_arena(order: str, zero_grad: str) -> None:
    stock = Loop("gpt2")
    pooled, alone = stock.copy(), stock.copy()
    torch.manual_seed(1)
    for i in range(100):
        iterate(stock, ORDERS[order](i), zero_grad)
    torch.manual_seed(1)
    with olla.pool() as pool:
        for i in range(100):
            iterate(pooled, ORDERS[order](i), zero_grad)
            pool.step()
            if i == 49:
                half = pool.report()
    with olla.pool() as single:
        for _ in range(6):
            iterate(alone, "A", zero_grad)
            single.step()
    assert equal(stock, pooled)
    report = pool.report()
    assert report.num_plans <= 6
    assert report.num_plans - half.num_plans <= (1 if order == "irregular" else 0)
    later = (report.served_bytes - half.served_bytes) / (report.requested_bytes - half.requested_bytes)
    assert later > (0.98 if order == "irregular" else 0.999)
    assert report.arena_bytes <= 1.005 * single.report().arena_bytes


def test_micro_batches_find_the_gradients_of_the_one_before() -> None:
    """Both begin with the same requests; what is in use tells them apart before these come."""

    def run(loop: Loop, pool: Any) -> None:
        for i in range(40):
            if i % 2 == 0:
                loop.optimizer.zero_grad()
            loss = loop.loss(loop.model, loop.batch)
            loss.backward()
            if i % 2:
                loop.optimizer.step()
            loop.losses.append(loss.item())
            if pool is not None:
                pool.step()
                reports.append(pool.report())

    reports: list[Any] = []
    stock = Loop("gpt2")
    pooled = stock.copy()
    torch.manual_seed(1)
    run(stock, None)
    torch.manual_seed(1)
    with olla.pool() as pool:
        run(pooled, pool)
    assert equal(stock, pooled)
    report = pool.report()
    assert report.num_plans == reports[19].num_plans <= 4
    assert report.missed_bytes - reports[19].missed_bytes < 0.001 * report.requested_bytes


def test_more_kinds_than_are_kept_neither_grow_nor_fail() -> None:
    model = torch.nn.Linear(32, 32)
    with olla.pool() as pool:
        for i in range(400):
            model.zero_grad()
            model(torch.ones(1 + i % 12, 32)).square().mean().backward()
            pool.step()
    assert pool.report().arena_bytes > 0
    assert len(pool._kinds) <= 8
    assert pool._kinds.num_seen <= kinds.MAX_SEEN


@pytest.mark.parametrize("other", ["B", "E"])
def test_a_kind_that_no_longer_comes_gives_its_memory_back(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_MAX_UNSEEN", 6)
    loop = Loop("gpt2")
    with olla.pool() as pool:
        for i in range(24):
            iterate(loop, "A" if i < 12 else other)
            pool.step()
            if i == 11:
                before = pool.report()
        after, (_, held) = pool.report(), pool._replay.arena
    assert (before.num_plans, after.num_plans) == (1, 2)
    assert held == after.arena_bytes < before.arena_bytes
    assert before.num_misses == 0
    assert after.served > 0.9


def test_the_most_frequent_kind_is_saved(tmp_path: object) -> None:
    loop, path = Loop("gpt2"), f"{tmp_path}/plan.csv"
    with olla.pool() as pool:
        for i in range(24):
            iterate(loop, "AAAB"[i % 4])
            pool.step()
    pool.save(path)
    with olla.pool(plan=path) as again:
        iterate(loop, "A")
        again.step()
    assert again.report().served > 0.99


def test_places_avoid_what_other_iterations_hold_and_keep_what_is_fixed() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        m = int(generator.integers(1, 12))
        size = generator.integers(1, 300, m)
        freed_at = np.minimum(np.arange(m) + generator.integers(1, m + 2, m), m)
        trace = Trace(size, freed_at)
        taken = kinds.merged(np.array([[64 * b, 64 * b + 70] for b in generator.integers(0, 20, 3)]), 64)
        fixed = np.where(generator.random(m) < 0.5, 64 * generator.integers(0, 20, m), -1)
        placed = trace.place(64, 1.0, 0, taken, fixed)
        end = placed.offsets + size
        for i in range(m):
            assert all(end[i] <= b or e <= placed.offsets[i] for b, e in taken.tolist())
            for j in range(i):
                if max(placed.lower[i], placed.lower[j]) < min(placed.upper[i], placed.upper[j]):
                    assert end[i] <= placed.offsets[j] or end[j] <= placed.offsets[i]
    alone = Trace(np.array([64, 64]), np.array([1, 2])).place(64, 1.0, 0, None, np.array([128, 128]))
    assert alone.offsets.tolist() == [128, 128]
