"""Models that read another value from Python at every call are not planned anew at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.aten.loops import assert_same, fresh, run, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Counts(nn.Module):
    """Blocks that count their calls, and may compute with the number."""

    def __init__(self, scaled: Callable[[int], float]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 4)
        self.scaled, self.num_calls = scaled, 0

    def forward(self, x: Any) -> Any:
        self.num_calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scaled(self.num_calls)


def loop(model: Any) -> list[Any]:
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for i in range(12):
        loss = model(torch.randn(8 if i != 9 else 5, 16)).square().mean()  # a smaller batch among them
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses.append(torch.tensor(model.num_calls))
    return losses


@pytest.mark.parametrize("goal", [{}, {"max_slowdown": 0.3}], ids=str)
@pytest.mark.parametrize(
    "scaled",
    [lambda n: 1.0, lambda n: 0.5 if n % 3 == 0 else 1.0, lambda n: min(1.0, n / 20), lambda n: 0.9**n],
    ids=["counted", "every third", "rising", "falling"],
)
def test_blocks_are_planned_on_their_own_after_five_calls(scaled: Callable[[int], float], goal: dict[str, Any]) -> None:
    report = assert_same(lambda: Counts(scaled), loop, goal)
    refused = [graph for graph in report.graphs if graph.reason]
    assert ["a value that it reads in Python" in graph.reason for graph in refused] == [True]
    assert (
        len(report.planned) == 5 + 2 * 2
    )  # whole models; a block, for two sizes, its input with a gradient and without
    assert report.num_unplanned_calls == 0


def test_a_model_beside_it_is_planned_whole() -> None:
    run(lambda: Counts(lambda n: 1.0), loop, {})
    model = nn.Sequential(Block(), Block())
    olla.wrap(model, time_limit=0.2)
    for _ in range(8):
        model(torch.randn(8, 16)).sum().backward()
    assert len(olla.report_of(model).graphs) == 1
    assert olla.report_of(model).num_unplanned_calls == 0


def test_modes_that_a_model_changes_between_are_planned_whole() -> None:
    class Modes(Block):
        mode = 0

        def forward(self, x: Any) -> Any:
            return super().forward(x) * (self.mode + 1)

    model = olla.wrap(Modes(), time_limit=0.2)
    for i in range(16):
        model.mode = i % 4
        model(torch.randn(8, 16)).sum().backward()
    assert [graph.reason for graph in olla.report_of(model).graphs] == [""] * 4
