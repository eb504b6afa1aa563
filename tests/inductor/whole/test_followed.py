"""Steps with Inductor's kernels that Dynamo follows: what their Python code reads and does, as in an ordinary loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.inductor.whole.test_separate import wide
from tests.support.pytorch.compiling import blocks, fresh, inputs, other_fusions  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


def nothing(state: dict[str, Any], model: Any, i: int) -> None:
    pass


def a_number(state: dict[str, Any], model: Any, i: int) -> None:
    state["factor"] = 1.0 + i // 2


def a_hook(state: dict[str, Any], model: Any, i: int) -> None:
    if i == 2:
        model.register_forward_hook(lambda module, args, result: result * 2)


def a_method(state: dict[str, Any], model: Any, i: int) -> None:
    if i == 2:
        forward = model.forward
        model.forward = lambda x: forward(x) - 1


def losses(model: nn.Module, batch: Any, change: Callable[..., None], planned: bool) -> tuple[list[Any], Any, Any]:
    """Train four steps; return losses, what the loss function has left in Python, and the step."""
    state: dict[str, Any] = {"factor": 1.0, "calls": 0, "seen": []}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(model: Any, x: Any) -> Any:
        state["calls"] += 1
        result = model(x)
        state["seen"].append(tuple(result.shape))
        return result.square().mean() * state["factor"], {"call": state["calls"], "mean": result.detach().mean()}

    step = olla.compile(model, optimizer=optimizer, loss=loss, kernels="inductor", on_unsupported="raise")
    found = []
    for i in range(4):
        change(state, model, i)
        if planned:
            value, beside = step(batch)
        else:
            value, beside = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert beside["call"] == i + 1
        found += [value.detach().clone(), beside["mean"].clone()]
    return found, (state["calls"], state["seen"]), step


@pytest.mark.parametrize("change", [nothing, a_number, a_hook, a_method], ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    "is_wide", [pytest.param(True, id="one graph"), pytest.param(False, id="separate graphs", marks=other_fusions)]
)
def test_python_code_runs_at_every_call(is_wide: bool, change: Callable[..., None]) -> None:
    model, batch = (wide(3, 128), torch.randn(4, 128)) if is_wide else (blocks(dropout=0.0), inputs(1)[0])
    expected, left, _ = losses(copy.deepcopy(model), batch, change, planned=False)
    found, ours, step = losses(model, batch, change, planned=True)
    assert step._follower is not None
    assert step._follower.reason == ""
    assert (step._captures.latest.runner.separate is None) == is_wide
    assert ours == left
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-3, atol=1e-6)
