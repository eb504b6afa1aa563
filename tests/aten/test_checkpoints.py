"""Checkpointed regions are recomputed in backward as the user has them, with the same random numbers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import olla
from tests.aten.loops import GOALS, assert_same, fresh, peak_bytes  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = norm(16), nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Chain(nn.Module):
    """Blocks, each in a checkpointed region of its own."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, **settings: Any) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block(norm) for _ in range(3))
        self.settings = settings

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings) if self.settings else block(x)
        return x


def loop(model: Any) -> list[Any]:
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(4):
        loss = model(torch.randn(32, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_train_the_same(reentrant: bool, goal: str) -> None:
    report = assert_same(functools.partial(Chain, use_reentrant=reentrant), loop, GOALS[goal])
    assert report.planned[0].num_again >= 3 * 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_draw_the_same_where_the_input_gets_a_gradient(reentrant: bool) -> None:
    def gradients(model: Any) -> list[Any]:
        found = []
        for _ in range(3):  # the first call runs as it is: its gradients might be differentiated
            x = torch.randn(32, 16, requires_grad=True)
            model(x).square().mean().backward()
            found += [x.grad, *(p.grad for p in model.parameters())]
            model.zero_grad()
        return found

    assert_same(functools.partial(Chain, use_reentrant=reentrant), gradients, {})


def policy(_: Any, target: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_product = target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_of_what_is_saved_is_kept() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    assert_same(functools.partial(Chain, use_reentrant=False, context_fn=contexts), loop, {})


def test_without_a_goal_a_checkpointed_model_needs_less_than_one_that_is_not() -> None:
    def measured(**settings: Any) -> int:
        torch.manual_seed(0)
        model, x = olla.wrap(Chain(**settings)), torch.randn(512, 16)
        model(x).sum().backward()
        return peak_bytes(lambda: model(x).sum().backward())

    assert measured(use_reentrant=False) < 0.7 * measured()


def test_statistics_of_a_checkpointed_batch_norm_are_updated_twice_as_in_eager_training() -> None:
    make = functools.partial(Chain, nn.BatchNorm1d, use_reentrant=False)
    report = assert_same(make, loop, {}, planned=False)
    assert "updates its statistics twice" in report.graphs[0].reason
