"""Small models for torch.compile, and backends for them; test modules that import this are skipped without torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from functorch.compile import make_boxed_func
from steps import nn, torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import olla.inductor
from olla.inductor import order, partition

NUM_STEPS = 20
LEAST = {"minimise": "peak"}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile everything anew, with caches that end with the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    partition.forget_warnings()
    order.forget()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield
    olla.inductor.disable()
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return y


def blocks(number: int = 2, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(number)))


def square(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().mean()
    return result


def inputs(number: int = NUM_STEPS, size: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(size, 32) for _ in range(number)]


def without_kernels(partition_fn: Any) -> Any:
    """A backend that runs forward and backward graphs op by op."""
    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
    )
