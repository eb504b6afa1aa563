"""An ordinary step of any optimizer, and all that it may change."""

from __future__ import annotations

import copy
import functools
from typing import Any

import olla
from tests.support.pytorch.steps import nn, torch


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def state_of(model: Any, optimizer: Any) -> list[Any]:
    """Everything that a step may change."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    states = [
        s for o in optimizers for p in (p for g in o.param_groups for p in g["params"]) for s in [o.state.get(p, {})]
    ]
    values = [v for state in states for v in state.values()]
    return [t.clone() if isinstance(t, torch.Tensor) else copy.copy(t) for t in (*model.state_dict().values(), *values)]


def same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b) for a, b in pairs)


def ordinary(model: Any, optimizer: Any, loss: Any, batch: Any) -> Any:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

    def closure() -> Any:
        for o in optimizers:
            o.zero_grad()
        found = loss(model, batch)
        found.backward()
        return found

    if isinstance(optimizers[0], torch.optim.LBFGS):
        return optimizers[0].step(closure)
    found = closure()
    for o in optimizers:
        o.step()
    return found


def step_of(planned: int, model: Any, optimizer: Any, **given: Any) -> Any:
    """Return a step of a loss= or a body step=: planned with what else is given, or the ordinary one."""
    if planned:
        return olla.compile(model, optimizer=optimizer, disk_cache=False, **given)
    if "step" in given:
        return functools.partial(given["step"], model, optimizer)
    return functools.partial(ordinary, model, optimizer, given["loss"])
