"""Inference that Dynamo follows: what the model returns, and all that it does to Python and to its buffers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
SETTINGS = {"disk_cache": False, "time_limit": 0.05, "on_unsupported": "raise"}


@dataclasses.dataclass
class Found:
    """What a model returns that pytree does not know."""

    values: Any
    call: int
    last: Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.scale, self.calls, self.seen, self.last = 1.0, 0, [], None

    def forward(self, x: Any) -> Any:
        self.calls += 1
        hidden = self.norm(self.first(x))
        if self.calls % 2:
            hidden = hidden.relu()
        self.seen.append(tuple(hidden.shape))
        found = Found(self.second(hidden) * self.scale, self.calls, self.last)
        self.last = found.values.sum()
        return found


def rows(i: int) -> Any:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(i))


def nothing(model: Any, i: int) -> None:
    pass


def scaled(model: Any, i: int) -> None:
    model.scale = 1.0 + i // 2


def in_turns(model: Any, i: int) -> None:
    model.train(i % 3 == 0)


def replaced(model: Any, i: int) -> None:
    if i == 2:
        model.second = nn.Linear(6, 6)
        with torch.no_grad():
            model.second.weight.fill_(0.25)
            model.second.bias.zero_()


def hooked(model: Any, i: int) -> None:
    if i == 2:
        model.first.register_forward_hook(lambda module, args, result: result + 1)


def with_another_method(model: Any, i: int) -> None:
    if i == 2:
        model.norm.forward = lambda x: x - 1


def trained(model: Any, i: int) -> None:
    with torch.no_grad():
        model.first.weight.mul_(0.5)


CHANGES = [nothing, scaled, in_turns, replaced, hooked, with_another_method, trained]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}], ids=["plain", "peak"])
def test_a_model_does_and_returns_what_it_does_without_a_plan(change: Callable[..., None], goal: Any) -> None:
    torch.manual_seed(0)
    ours = Net()
    eager = copy.deepcopy(ours)
    step = olla.compile(ours, **SETTINGS, **goal)
    for i in range(6):
        for model in (ours, eager):
            change(model, i)
        found, expected = step(rows(i)), eager(rows(i))
        assert torch.equal(found.values, expected.values)
        assert not found.values.requires_grad
        assert found.call == expected.call == i + 1
        assert found.last is None if i == 0 else torch.equal(found.last, expected.last)
        assert torch.equal(ours.last, eager.last)
    assert ours.seen == eager.seen
    assert all(map(torch.equal, ours.state_dict().values(), eager.state_dict().values()))
    assert step.report().num_ordinary_steps == 0
    assert step._follower is not None
    assert step._follower.reason == ""


def test_a_tensor_beside_the_model_is_passed_at_every_call() -> None:
    scale = torch.ones(6, requires_grad=True)
    model = nn.Linear(6, 6)
    model.register_forward_hook(lambda module, args, result: result * scale)
    step = olla.compile(model, **SETTINGS)
    for i in range(3):
        with torch.no_grad():
            scale.fill_(i)
        assert torch.equal(step(rows(i)), model(rows(i)))
    scale = torch.full((6,), 7.0, requires_grad=True)
    assert torch.equal(step(rows(0)), model(rows(0)))
    assert len(step._captures) == 1


def test_a_cache_is_returned_as_the_model_returns_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    step = olla.compile(model, **SETTINGS)
    tokens = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        expected = model(input_ids=tokens)
    for _ in range(2):
        found = step({"input_ids": tokens})
        assert torch.equal(found.logits, expected.logits)
        assert type(found.past_key_values) is type(expected.past_key_values)
        for ours, eager in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert torch.equal(ours.keys, eager.keys)
            assert torch.equal(ours.values, eager.values)
