"""Modules whose checkpoints are tested, and what a step of them gives."""

import copy
from collections.abc import Callable
from typing import Any

from tests.support.pytorch.steps import nn, torch


class Residual(nn.Module):
    """Blocks whose results are added to what they take."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def mlp(width: int = 32, dropout: float = 0.1) -> nn.Module:
    """Return a block with layer norm, two linear layers and dropout."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
    )


def conv(width: int = 8) -> nn.Module:
    """Return a block with batch norm and an activation in place."""
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 1)
    )


def square(model: Any, batch: Any) -> torch.Tensor:
    """Return a loss."""
    result: torch.Tensor = model(batch).float().square().mean()
    return result


def outcome(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], torch.Tensor] = square, num_steps: int = 2
) -> list[torch.Tensor]:
    """Train a copy of a model; return losses, gradients, parameters and buffers."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        found += [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    found.append(torch.rand(2))  # as many numbers were drawn
    return [*found, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two outcomes are equal to the bit."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
