"""Gradients that are differentiated: such graphs run as they are, to the bit, and the report says so."""

from __future__ import annotations

from typing import Any

import pytest

import olla
from tests.aten.loops import assert_same, fresh  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


def judge(*middle: Any) -> Any:
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Linear(16, 1))


def penalised(model: Any) -> list[Any]:
    optimizer, losses = torch.optim.Adam(model.parameters()), []
    for _ in range(4):
        x = torch.randn(4, 8, requires_grad=True)
        result = model(x)
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        loss = result.mean() + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain() -> Any:
    return judge()


def dropping() -> Any:
    return judge(nn.Dropout(0.2))


def normed() -> Any:
    return judge(nn.BatchNorm1d(16), nn.Dropout(0.2))


@pytest.mark.parametrize("make", [plain, dropping, normed])
def test_a_penalty_on_gradients_of_inputs_is_the_same(make: Any) -> None:
    report = assert_same(make, penalised, {"max_slowdown": 0.5}, planned=False)
    assert "its gradients are differentiated" in report.graphs[0].reason


def products(model: Any) -> list[Any]:
    """Hessian-vector products: nothing tells beforehand that gradients are differentiated."""
    found = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        found += torch.autograd.grad(sum((g * g).sum() for g in gradients), list(model.parameters()))
    return found


def test_second_derivatives_of_parameters_are_there_and_the_same_from_the_second_call_on() -> None:
    def trained(wrapped: bool) -> list[Any]:
        torch.manual_seed(0)
        model = judge(nn.Dropout(0.2))
        return products(olla.wrap(model) if wrapped else model)

    eager, ours = trained(False), trained(True)
    num = len(eager) // 3
    for a, b in zip(eager[:num], ours[:num], strict=True):  # the first call's backward was compiled
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(eager[num:], ours[num:], strict=True))


def test_inputs_with_gradients_that_are_not_differentiated_are_planned_from_the_second_call_on() -> None:
    def loop(model: Any) -> list[Any]:
        found = []
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            model(x).sum().backward()
            found.append(x.grad)
        return found

    report = assert_same(judge, loop, {})
    assert (report.num_calls, report.num_unplanned_calls) == (3, 1)
