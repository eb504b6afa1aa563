"""A wrapped model inside `olla.pool`: forward, backward and update lie in one arena, at planned addresses."""

from __future__ import annotations

from typing import Any

import pytest

import olla
from tests.aten.loops import fresh, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
NUM_STEPS = 12
NUM_LEARNT = 8  # steps until both kinds of iterations have a plan


def train(
    model: Any, goal: dict[str, Any] | None, rows: tuple[int, ...], pool: Any = None, reports: Any = None
) -> list[Any]:
    """Train with AdamW, clipping, two batches an update and an evaluation behind it; return losses and parameters."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if goal is not None:
        olla.wrap(model, **goal)
    found = []
    for i in range(NUM_STEPS):
        for _ in range(2):
            loss = model(torch.full((rows[i % len(rows)], 64), 0.1 * (i + 1))).square().mean() / 2
            loss.backward()
            found.append(torch.tensor(loss.item()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(torch.tensor(model(torch.ones(8, 64)).sum().item()))
        if pool is not None:
            pool.step()
        if reports is not None:
            reports.append(pool.report())
    return found + [p.detach().clone() for p in model.parameters()]


def deep(dropout: bool) -> Any:
    torch.manual_seed(1)
    layers = (nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1 * dropout), nn.Linear(256, 64))
    return nn.Sequential(*(layer for _ in range(4) for layer in layers))


@pytest.mark.parametrize("goal", [{}, {"max_slowdown": 0.1}, {"minimise": "peak"}])
@pytest.mark.parametrize("rows", [(256,), (256, 96)], ids=["one size", "two sizes"])
def test_a_wrapped_loop_runs_at_planned_addresses(goal: dict[str, Any], rows: tuple[int, ...]) -> None:
    wanted = train(deep(dropout=True), None, rows)
    reports = []
    with olla.pool() as pool:
        found = train(deep(dropout=True), goal, rows, pool, reports)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
    report = reports[-1]
    asked = report.requested_bytes - reports[NUM_LEARNT].requested_bytes
    assert report.state == "planned"
    assert report.num_misses == reports[NUM_LEARNT].num_misses or len(rows) > 1  # what one kind left may lie in the way
    assert report.served_bytes - reports[NUM_LEARNT].served_bytes > (0.99 if len(rows) == 1 else 0.95) * asked
    assert report.load_bytes <= report.arena_bytes <= 1.01 * report.load_bytes


def test_the_arena_shrinks_as_the_plan_says() -> None:
    arenas, planned = {}, {}
    for name, goal in (("order", {}), ("peak", {"minimise": "peak"})):
        model = nn.Sequential(*deep(dropout=False), nn.Linear(64, 1))  # beside the plan, the loss needs little
        with olla.pool() as pool:
            train(model, goal, (1024,), pool)
            arenas[name] = pool.report().arena_bytes
        (graph,) = olla.report_of(model).planned
        planned[name] = graph.peak_bytes
    saved = planned["order"] - planned["peak"]
    assert saved > 2**20
    assert arenas["order"] - arenas["peak"] == pytest.approx(saved, rel=0.02)
