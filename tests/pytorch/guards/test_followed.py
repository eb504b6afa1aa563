"""What Dynamo sees of a loss at every call: each of these was frozen into the captured step, in silence."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import olla
from olla.pytorch.guards.followed import NOT_FOLLOWED, Followed
from tests.support.pytorch.steps import nn, square, torch

pytestmark = pytest.mark.torch


class Settings:
    """What a trainer holds."""

    weight_l2 = 0.5
    dims: Any = None


@dataclasses.dataclass
class Focal:
    """Settings of a loss."""

    gamma: float = 0.5


class Scale(torch.overrides.TorchFunctionMode):
    """Multiplies what ReLUs return."""

    factor = 0.5

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * self.factor if function is torch.relu else result


def by_a_computed_name() -> tuple[Any, Callable[[float], Any]]:
    settings = Settings()

    def loss(model: Any, x: Any) -> Any:
        return model(x).square().mean() * sum(getattr(settings, f"weight_{name}") for name in ("l2",))

    return loss, lambda value: setattr(settings, "weight_l2", value)


def by_asdict() -> tuple[Any, Callable[[float], Any]]:
    settings = Focal()

    def focal(y: Any, gamma: float) -> Any:
        return (y.square() * gamma).mean()

    return lambda model, x: focal(model(x), **dataclasses.asdict(settings)), lambda v: setattr(settings, "gamma", v)


def by_vars_of_an_instance() -> tuple[Any, Callable[[float], Any]]:
    settings = Settings()
    settings.weight_l2 = 0.5

    def loss(model: Any, x: Any) -> Any:
        return model(x).square().mean() * {**vars(settings)}["weight_" + "l2"]

    return loss, lambda value: setattr(settings, "weight_l2", value)


def by_a_function_mode() -> tuple[Any, Callable[[float], Any]]:
    mode = Scale()

    def loss(model: Any, x: Any) -> Any:
        with mode:
            return torch.relu(model(x)).mean()

    return loss, lambda value: setattr(mode, "factor", value)


@pytest.mark.parametrize("make", [by_a_computed_name, by_asdict, by_vars_of_an_instance, by_a_function_mode])
def test_a_number_that_is_found_indirectly_is_seen_to_change(make: Any) -> None:
    loss, change = make()
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.ones(2, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = olla.compile(model, optimizer=optimizer, loss=loss, arena=False, disk_cache=False)
    for value in (0.5, 0.25, 0.5):
        change(value)
        with torch.no_grad():
            expected = loss(model, x)
        assert torch.equal(step(x), expected)
    assert step.report().num_captures == 2


class Keeping(nn.Module):
    """Keeps a map of its last call for the user."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.seen: Any = None

    def forward(self, x: Any) -> Any:
        """Keep the softmax of what is returned."""
        y = self.linear(x)
        self.seen = y.softmax(1).detach()
        return y


def test_what_a_model_keeps_of_itself_is_that_of_the_last_call() -> None:
    torch.manual_seed(0)
    model = Keeping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=square, arena=False, disk_cache=False)
    for i in range(4):
        x = torch.full((2, 6), 1.0 + i)
        with torch.no_grad():
            expected = model.linear(x).softmax(1)
        step(x)
        assert torch.equal(model.seen, expected)
    assert (step.report().num_captures, step.report().num_ordinary_steps) == (1, 0)


def test_a_list_that_a_loss_appends_to_is_told_of_and_filled() -> None:
    losses: list[Any] = []

    def loss(model: Any, x: Any) -> Any:
        losses.append(model(x).square().mean().detach())
        return model(x).square().mean()

    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=loss, arena=False, disk_cache=False)
    with pytest.warns(UserWarning, match="losses"):
        step(torch.ones(2, 6))
    step(torch.ones(2, 6))
    assert len(losses) == 2
    assert losses[0] != losses[1]


def test_parameters_lent_to_a_functional_call_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def loss(model: Any, x: Any) -> Any:
        halves = {name: p * 0.5 for name, p in model.named_parameters()}
        return torch.func.functional_call(model, halves, (x,)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=loss, arena=False, disk_cache=False)
    for _ in range(3):
        step(torch.ones(2, 6))
    assert (step.report().num_captures, step.report().num_ordinary_steps) == (1, 0)


def test_a_mode_that_is_set_to_what_it_is_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def loss(model: Any, x: Any) -> Any:
        return model.train()(x).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(model, optimizer=optimizer, loss=loss, arena=False, disk_cache=False)
    for _ in range(3):
        step(torch.ones(2, 6))
    assert (step.report().num_captures, step.report().num_ordinary_steps) == (1, 0)


class Watching(TorchDispatchMode):
    """Sees all operators."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_function_never_runs_while_it_is_followed() -> None:
    calls = []

    def loss(model: Any, x: Any) -> Any:
        calls.append(1)
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return model(x).sum()

    followed, model = Followed(loss), nn.Linear(6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert followed.variant(model, torch.ones(2, 6), "key") == NOT_FOLLOWED
    with Watching():  # Dynamo leaves code alone inside it
        assert Followed(loss).variant(model, torch.ones(2, 6), "key") == NOT_FOLLOWED
    assert not calls


def test_gradients_of_an_ordinary_step_before_are_told_of_once() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for keeps in (False, True):
        model(torch.ones(2, 6)).sum().backward()
        step = olla.compile(
            model, optimizer=optimizer, loss=square, arena=False, disk_cache=False, keep_gradients=keeps
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step(torch.ones(2, 6))
            step(torch.ones(2, 6))
        assert [str(w.message)[:36] for w in told] == ["gradients that were in .grad before "] * (not keeps)
        assert (model.weight.grad is not None) == keeps
