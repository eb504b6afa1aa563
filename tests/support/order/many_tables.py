"""A small recommendation model of very many embedding tables of unequal sizes, as DLRM has them."""

from __future__ import annotations

import random
from typing import Literal

import torch

import olla


class ManyTables(torch.nn.Module):
    """Dense features through an MLP, sums of rows of each table, all joined into an MLP."""

    def __init__(self, num_tables: int, width: int = 16) -> None:
        super().__init__()
        rows = random.Random(num_tables)
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(rows.choice((10, 100, 2000)), width, mode="sum") for _ in range(num_tables)
        )
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, 64), torch.nn.ReLU(), torch.nn.Linear(64, width))
        joined = width * (num_tables + 1)
        self.top = torch.nn.Sequential(torch.nn.Linear(joined, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(dense), *(table(ids[:, i]) for i, table in enumerate(self.tables))]
        score: torch.Tensor = self.top(torch.cat(parts, 1)).squeeze(1)
        return score


def captured_step(num_tables: int, optimizer: Literal["sgd", "adam"] = "sgd", batch: int = 64) -> olla.Graph:
    """Capture a training step of the model."""
    model = ManyTables(num_tables)
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    inputs = torch.randn(batch, 13), torch.randint(0, 10, (batch, num_tables, 4)), torch.rand(batch)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        dense, ids, clicked = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(model(dense, ids), clicked)

    return olla.capture(model, inputs, optimizer=kind(model.parameters(), lr=0.1), loss=loss).graph
