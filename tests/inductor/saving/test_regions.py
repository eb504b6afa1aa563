"""Regions that are compiled once and called often: what is saved is planned for the whole step."""

from __future__ import annotations

from typing import Any

import pytest

import olla.inductor
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, fresh, square, untold  # noqa: F401
from tests.support.pytorch.steps import IS_211, nn, torch

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")]


deep = pytest.param(2, marks=pytest.mark.skipif(IS_211, reason="torch 2.11 compiles no region in a region"))


class Block(nn.Module):
    """A block of a transformer without attention; ``depth`` says how deep regions stand in one another."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow, self.dropout = nn.Linear(4 * width, width), dropout
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (residual, region, region_with_region)[self.depth](self, x)


def inner(block: Block, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(block.wide(block.norm(x)))


def residual(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + nn.functional.dropout(block.narrow(inner(block, x)), block.dropout)


inner_region = torch.compiler.nested_compile_region(inner)
region = torch.compiler.nested_compile_region(residual)


@torch.compiler.nested_compile_region
def region_with_region(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + nn.functional.dropout(block.narrow(inner_region(block, x)), block.dropout)


def network(depth: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(16, depth, dropout) for _ in range(3)))


def gradients(model: nn.Module, **compiling: Any) -> list[torch.Tensor]:
    torch.manual_seed(2)
    step = torch.compile(model, **compiling) if compiling else model
    loss = square(step, torch.randn(24, 16))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("depth", [1, deep])
def test_gradients_are_those_of_an_ordinary_loop(depth: int) -> None:
    found = gradients(network(depth), backend="olla", options=LEAST)
    torch.testing.assert_close(found, gradients(network(0)))


@pytest.mark.parametrize("depth", [1, deep])
def test_dropout_is_inductors(depth: int) -> None:
    found = gradients(network(depth, 0.3), backend="olla", options=LEAST)
    torch.compiler.reset()
    torch.testing.assert_close(found, gradients(network(depth, 0.3), backend="inductor"))


@pytest.mark.parametrize("goal", [{"minimise": "peak"}, {"max_slowdown": 0.05}])
def test_the_peak_is_that_of_the_step_without_regions(goal: dict[str, Any]) -> None:
    peaks = []
    for depth in (0, 1) if IS_211 else (0, 1, 2):
        with olla.inductor.enable(**goal):
            peaks.append(replay(network(depth), torch.ones(512, 16), square).peak_bytes)
    assert len(set(peaks)) == 1
