"""Constants of a compiled step: the key of a batch, and the settings of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from olla._core import same_objects
from olla.pytorch.capture import optimizers
from olla.pytorch.capture.inputs import plain_batch
from olla.pytorch.guards.facts import leaf_facts
from olla.pytorch.guards.modes import modes
from olla.pytorch.guards.values import equal


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a batch and its structure, without looking at the leaves."""
    return pytree.tree_flatten(plain_batch(batch))


class Settings:
    """The settings of an optimizer that a capture holds constant, and which parameters each group has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = [tuple(group) for group in optimizer.param_groups]
        self._kept = [_constant_names(group) for group in optimizer.param_groups]
        self._keep(self._read())

    def change(self) -> str:
        """Return what has changed, in words; empty where nothing has."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._names):
            return f"the optimizer has {len(groups)} groups of parameters, and had {len(self._names)}"
        values = self._read()
        if same_objects(values, self._ids):
            return ""
        if [tuple(group) for group in groups] != self._names or not equal(self._values, values):
            return "the settings of the optimizer changed"
        self._keep(values)
        return ""

    def _keep(self, values: list[Any]) -> None:
        self._values, self._ids = values, np.fromiter(map(id, values), dtype=np.uint64)

    def _read(self) -> list[Any]:
        values: list[Any] = [optimizers.own_step(self._optimizer)]
        for group, names in zip(self._optimizer.param_groups, self._kept, strict=True):
            values += map(group.get, names)
            values += [isinstance(group.get(rate), torch.Tensor) for rate in ("lr", "momentum")]
            values += group["params"]
            if "momentum" in optimizers.rates(group) and "betas" in group:
                values += group["betas"][1:]
        return values


def _constant_names(group: dict[str, Any]) -> list[str]:
    cycled = "momentum" in optimizers.rates(group)
    return [name for name in optimizers.constants(group) if not (cycled and name == "betas")]


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where a model is; the CPU if it has neither parameters nor buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        return torch.device(tensor.device)
    return torch.device("cpu")


def batch_key(leaves: Sequence[Any], spec: pytree.TreeSpec, device_type: str) -> tuple[Any, ...]:
    """Return the properties of a batch, and of the state of torch, that a capture assumes constant."""
    return (spec, leaf_facts(leaves), modes(device_type))
