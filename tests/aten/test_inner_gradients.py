"""Gradients of what a model returns beside its result: autograd sees none inside of a planned graph, and we say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.aten.loops import TIME_LIMIT, fresh, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Featured(nn.Module):
    """Returns features beside what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.head(features.relu()), features


def retained(features: torch.Tensor, found: list[torch.Tensor]) -> None:
    features.retain_grad()


def hooked(features: torch.Tensor, found: list[torch.Tensor]) -> None:
    features.register_hook(lambda gradient: gradient is not None and found.append(gradient))  # type: ignore[no-untyped-call]


def train(model: nn.Module, ask: Callable[[torch.Tensor, list[torch.Tensor]], None] | None) -> list[torch.Tensor]:
    """Train; return losses, and for every step the gradient of the features, or an empty tensor."""
    torch.manual_seed(0)
    optimizer, found = torch.optim.Adam(model.parameters()), []
    for _ in range(4):
        gradients: list[torch.Tensor] = []
        scores, features = model(torch.randn(6, 8))
        if ask is not None:
            ask(features, gradients)
        loss = scores.square().mean() + features.abs().mean()
        loss.backward()
        if ask is retained and features.grad is not None:
            gradients.append(features.grad)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), gradients[0].clone() if gradients else torch.empty(0)]
    return [*found, *model.parameters()]


def made() -> Featured:
    torch.manual_seed(0)
    return Featured()


@pytest.mark.parametrize("ask", [retained, hooked])
def test_they_are_eagers_from_the_second_step_on_and_a_warning_names_the_first(ask: Any) -> None:
    eager = train(made(), ask)
    model = olla.wrap(made(), time_limit=TIME_LIMIT)
    with pytest.warns(
        UserWarning, match=r"it lacks what flows back from those. From the next call on the graph runs as"
    ):
        ours = train(model, ask)
    assert [i for i, (a, b) in enumerate(zip(eager, ours, strict=True)) if a.shape != b.shape or not same(a, b)] == [1]
    assert "gradients of values inside are asked for" in olla.report_of(model).graphs[0].reason


def test_a_model_whose_features_nobody_asks_stays_planned() -> None:
    eager, model = train(made(), None), olla.wrap(made(), time_limit=TIME_LIMIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = train(model, None)
    assert all(map(same, eager, ours))
    assert olla.report_of(model).planned


def test_what_is_differentiated_by_them_is_called_unwrapped() -> None:
    model, x = olla.wrap(made().eval(), time_limit=TIME_LIMIT), torch.randn(6, 8)
    scores, features = model(x)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(scores.sum(), features)
    scores, features = model.forward(x)
    plain_scores, plain = made().eval()(x)
    found, expected = torch.autograd.grad(scores.sum(), features), torch.autograd.grad(plain_scores.sum(), plain)
    assert same(found[0], expected[0])
