"""Random numbers for tensors that lie in memory in another order than their dimensions: those of eager training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.aten.loops import fresh, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
functional = torch.nn.functional
DRAWS: dict[str, Callable[[Any], Any]] = {
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ of shares": lambda x: x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "geometric_": lambda x: x * torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: x * torch.empty_like(x).random_(0, 9),
    "trunc_normal_": lambda x: x * nn.init.trunc_normal_(torch.empty_like(x)),
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal": lambda x: x + torch.normal(x.detach(), 1.0),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "gamma": lambda x: x * torch.distributions.Gamma(x.detach().abs() + 0.1, 1.0).sample(),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.3, True, inplace=True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x, 0.3, True),
    "dropout1d": lambda x: functional.dropout1d(x, 0.3, True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, hard=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_drawn_in_the_order_of_memory(name: str) -> None:
    torch.manual_seed(0)
    given = torch.randn(8, 6, 32)
    results = []

    def drawn(x: Any) -> Any:
        return DRAWS[name]((x * 2).permute(2, 0, 1))

    wrapped = olla.wrap(drawn, time_limit=0.2)
    for called in (drawn, wrapped):
        torch.manual_seed(1)
        leaf = given.clone().requires_grad_()
        result = called(leaf.clone())  # with a leaf of the user's own, the first call would run as it is
        result.square().sum().backward()
        results.append((result.detach(), leaf.grad, torch.rand(1)))
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert olla.report_of(wrapped).num_unplanned_calls == 0
