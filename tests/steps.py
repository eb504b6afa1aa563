"""Small training steps, eager and captured; test modules that import this are skipped where torch is missing."""

from __future__ import annotations

import copy
import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'olla-planner[torch]'")
pytest.importorskip("transformers", reason="the models of these tests come from transformers: pip install transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from torch import nn  # noqa: E402

import models  # noqa: E402, F401
from olla.pytorch.inputs import gather  # noqa: E402
from olla.pytorch.run import run  # noqa: E402

STEPS = 3


def square(model: nn.Module, x: Any) -> Any:
    """A loss for models that take one tensor."""
    return model(x).square().mean()


def net() -> nn.Module:
    """A small network with batch norm buffers, an in-place activation and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 5)
    )


def images() -> Any:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class World:
    """A model with its optimizer, batch and loss, before any step."""

    model: nn.Module
    optimizer: Any
    batch: Any
    loss: Callable[[Any, Any], Any]

    def copy(self) -> World:
        """The same, sharing nothing; the optimizer updates one parameter at a time."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        for group in optimizer.param_groups:
            group["foreach"] = False
        return World(model, optimizer, self.batch, self.loss)

    def values(self) -> list[Any]:
        """Parameters, buffers and optimizer state, in a fixed order."""
        states = [self.optimizer.state.get(p, {}) for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *(s[k] for s in states for k in sorted(s) if s[k] is not None)]

    def eager(self, steps: int = STEPS) -> list[Any]:
        torch.manual_seed(7)
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss(self.model, self.batch)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def captured(self, step: olla.pytorch.capture.Captured, order: Any = None, steps: int = STEPS) -> list[Any]:
        torch.manual_seed(7)
        values = gather(step.inputs, self.model, self.batch, self.optimizer)
        return [run(step, values, order)[0].clone() for _ in range(steps)]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def capture(world: World) -> Any:
    return olla.capture(world.model, world.batch, optimizer=world.optimizer, loss=world.loss)


def topological(graph: olla.Graph, priority: Callable[[int], Any]) -> np.ndarray:
    """A valid order that always runs the ready op of least priority."""
    missing = [len(graph.core.preds(v)) for v in range(graph.num_ops)]
    followers: list[list[int]] = [[] for _ in missing]
    for v in range(graph.num_ops):
        for u in graph.core.preds(v):
            followers[u].append(v)
    ready = [(priority(v), v) for v, n in enumerate(missing) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        v = heapq.heappop(ready)[1]
        order.append(v)
        for w in followers[v]:
            missing[w] -= 1
            if missing[w] == 0:
                heapq.heappush(ready, (priority(w), w))
    assert graph.core.is_order(np.array(order, dtype=np.int32))
    return np.array(order, dtype=np.int32)
