"""Whole steps beside separate graphs: which of them runs, and that what is foreseen of both is so."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import olla
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from olla.inductor.whole.compile import compile_step
from olla.inductor.whole.joined import Asked, Whole
from tests.support.pytorch.compiling import blocks, fresh, inputs, other_fusions, square  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch


def wide(depth: int = 6, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def stepped(model: nn.Module, batch: torch.Tensor, num_steps: int) -> tuple[Any, list[torch.Tensor]]:
    """Return a compiled step and its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = olla.compile(model, optimizer=optimizer, loss=square, kernels="inductor")
    return step, [step(batch).detach().clone() for _ in range(num_steps)]


def eager(model: nn.Module, batch: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """Return the losses of an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        loss = square(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("is_wide", [True, pytest.param(False, marks=other_fusions)])
def test_one_graph_runs_where_gradients_are_much_of_the_peak(is_wide: bool) -> None:
    model, batch = (wide(), torch.randn(4, 256)) if is_wide else (blocks(dropout=0.0), inputs(1)[0])
    expected = eager(copy.deepcopy(model), batch, 3)
    step, found = stepped(model, batch, 3)
    runner = step._captures.latest.runner
    assert (runner.separate is None) == is_wide
    assert (runner._whole.run is not None) == is_wide  # no code was generated in vain
    assert ("as one graph" in step.report().note) == is_wide
    assert len(step._captures) == 1  # what torch.compile changes in torch is no reason for another one
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-3)
    assert all(p.grad is None for p in model.parameters())


@other_fusions
@pytest.mark.parametrize("is_wide", [True, False])
def test_what_separate_graphs_need_is_foreseen_as_a_replay_finds_it(is_wide: bool) -> None:
    model, batch = (wide(), torch.randn(4, 256)) if is_wide else (blocks(), inputs(1)[0])
    num_bytes = sum(p.nbytes for p in model.parameters())
    captured = olla.capture(model, batch, optimizer=torch.optim.AdamW(model.parameters()), loss=square)
    whole = compile_step(captured, Asked(compares=True), kernels=False)
    separate = replay(model, batch, square, backend="olla", state_bytes=2 * num_bytes)
    assert whole.separate_peak_bytes == pytest.approx(separate.peak_bytes, rel=0.01)


def test_one_graph_runs_where_it_alone_fits_the_budget() -> None:
    whole = Whole([], Asked(patches(budget=97)["custom_partitioner_fn"].goal))
    assert whole._gains(97, 100)
    assert not whole._gains(98, 100)
    assert not whole._gains(96, 97)
