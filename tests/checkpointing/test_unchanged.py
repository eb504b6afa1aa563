"""What the Python code of a model notes in its modules is the loop's own: trying a step leaves nothing there."""

from __future__ import annotations

import collections
from typing import Any

import pytest

import olla
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Notes(nn.Module):
    """Blocks that count their calls, keep a history and a cache, and compute with all of them."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.asks = asks  # for a value, so that the step is tried on real tensors
        self.num_calls, self.scale = 0, 1.0
        self.history: list[Any] = []
        self.seen: dict[str, Any] = {"sizes": [], "latest": collections.deque(maxlen=2)}
        self.kinds: set[Any] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.cache: Any = None
        self.latest: list[Any] = []

    def forward(self, x: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.scale *= 0.9
        if self.cache is None:
            self.cache = torch.linspace(0.5, 1.5, 16)
        for block in self.blocks:
            x = x + block(x * self.cache) * self.scale
        norm = x.detach().norm()
        if self.asks and norm > 0:
            x = x * 1.5
        self.history.append(norm)
        self.seen["sizes"].append(tuple(x.shape))
        self.seen["latest"].append(norm)
        self.kinds.add(len(self.history))
        self.counts["calls"] += 1
        self.latest = [norm]
        return x


def noted(model: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(model).items() if not name.startswith("_")}


@pytest.mark.parametrize("asks", [False, True])
def test_a_step_that_is_tried_notes_nothing(asks: bool) -> None:
    torch.manual_seed(0)
    model, x = Notes(asks), torch.randn(8, 16)
    model(x)
    before = repr(noted(model))
    history = model.history
    olla.checkpoint(model, x, minimise="peak")
    assert repr(noted(model)) == before
    assert model.history is history
    assert all(type(norm) is torch.Tensor for norm in [*model.history, *model.seen["latest"], *model.latest])


@pytest.mark.parametrize("asks", [False, True])
def test_a_model_that_counts_trains_as_it_is(asks: bool) -> None:
    losses = []
    for plans in (False, True):
        torch.manual_seed(0)
        model = Notes(asks)
        optimizer = torch.optim.AdamW(model.parameters())
        if plans:
            olla.checkpoint(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), minimise="peak")
        losses.append([])
        for _ in range(5):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        losses[-1] += [float(norm) for norm in model.history] + [model.scale, *model.counts.values()]
    assert losses[0] == losses[1]
