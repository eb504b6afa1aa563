"""Small models for torch.compile, and backends for them; test modules that import this are skipped without torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

import olla.inductor
from olla.inductor.compat import fallback
from olla.inductor.kernels import order
from olla.inductor.saving.partition import Partitioner
from tests.support.pytorch.steps import IS_211, nn, torch

NUM_STEPS = 20
LEAST = {"minimise": "peak"}
other_fusions = pytest.mark.skipif(IS_211, reason="Inductor of torch 2.11 fuses otherwise, and needs more for this")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Plan everything anew: no graph comes out of torch's caches, though machine code of the same kernels does."""
    fallback.forget()
    order.forget()
    torch.compiler.reset()
    no_autograd_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with warnings.catch_warnings(), torch._inductor.config.patch(fx_graph_cache=False), no_autograd_cache:
        warnings.filterwarnings("ignore", module="torch")
        yield
    olla.inductor.disable()
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """No graph is left to torch, which would be warned of; only for test modules that import this."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="olla")
        yield


@pytest.fixture
def caches(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep graphs in torch's caches, which end with the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    autograd_cache = torch._functorch.config.patch(enable_autograd_cache=True)
    with torch._inductor.config.patch(fx_graph_cache=True), autograd_cache:
        yield


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
    """A backend that runs forward and backward graphs op by op; budgets are held by the plan, as there is no code."""
    if isinstance(partition_fn, Partitioner):
        partition_fn.foresee = None
    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,  # as Inductor has it
    )
