"""Ordinary training loops, as they are run inside olla.pool."""

from __future__ import annotations

import copy
from typing import Any

from tests.support.pytorch.steps import models, torch


class Loop:
    """An ordinary training loop of one of the example models."""

    def __init__(self, name: str, optimizer: str = "adamw") -> None:
        torch.manual_seed(0)
        example = models.build(name, 4, tiny=True, device="cpu")
        self.model, self.batch, self.loss = example.model, example.batch, example.loss
        self.optimizer = models.optimizer(optimizer, self.model)
        self.losses: list[float] = []

    def copy(self) -> Loop:
        return copy.deepcopy(self)

    def iterate(self, batch: Any = None) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, self.batch if batch is None else batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        return [*self.model.state_dict().values(), *(v for s in state.values() for v in s.values())]


def equal(a: Loop, b: Loop) -> bool:
    return a.losses == b.losses and all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def halved(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
