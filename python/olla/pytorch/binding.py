"""What a step takes at every call: the user's own tensors, found quickly, and the key of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from olla._core import same_objects
from olla.pytorch.capture import optimizers
from olla.pytorch.capture.inputs import Input, plain_batch
from olla.pytorch.guards.modes import modes
from olla.pytorch.guards.values import same
from olla.pytorch.sharded.fully import Shards, is_sharded

Gather = Callable[[Sequence[Any]], list[torch.Tensor]]


class InputBinding:
    """The tensors of a model and its optimizer, where a capture found them.

    Parameters, buffers and optimizer state may be replaced by others at any time; the guard of the capture sees to it
    that the modules stay the same.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._shards = Shards() if is_sharded(model) else None
        # Where each parameter and buffer stands: the dict that holds it, and its name there.
        self._parameters = _places(model, "_parameters")
        self._buffers = _places(model, "_buffers")

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters and buffers as they are now."""
        return [holder[name] for holder, name in (*self._parameters.values(), *self._buffers.values())]

    def updated(self) -> list[int]:
        """Return which of ``tensors`` the optimizer updates, in its order; -1: another one."""
        position = {id(t): i for i, t in enumerate(self.tensors())}
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [position.get(id(p), -1) for group in groups for p in group["params"]]

    def parameter(self, name: str) -> torch.Tensor:
        """Return one parameter as it is now."""
        holder, last = self._parameters[name]
        parameter: torch.Tensor = holder[last]
        return parameter

    def gatherer(self, inputs: Sequence[Input]) -> Gather:
        """Return a function of the batch's leaves that gives the tensors of a capture's inputs.

        It is generated: a lookup per tensor, with nothing of ours in between, is the larger part of a call's own time.
        """
        known: dict[str, Any] = {"state_of": optimizers.parameter_state, "rate": optimizers.rate_tensor}
        known |= {"optimizer": self.optimizer, "shard": self._shards}
        states: dict[str, str] = {}  # where a parameter stands -> the name of its state
        items = []
        for i, entry in enumerate(inputs):
            key = str(entry.key)
            if entry.kind == "input":
                items.append(f"leaves[{key}]")
            elif entry.kind == "rate":
                items.append(f"rate(optimizer.param_groups[{key}], {entry.entry!r})")
            else:
                holder, name = (self._buffers if entry.kind == "buffer" else self._parameters)[key]
                known[f"d{i}"] = holder
                place = f"d{i}[{name!r}]"
                if entry.kind == "optimizer_state":
                    place = f"{states.setdefault(key, f's{len(states)} := state_of(optimizer, {place})')}"
                    states[key] = place.split()[0]
                    place = f"({place})[{entry.entry!r}]"
                items.append(place if self._shards is None else f"shard({place})")
        exec(f"def gather(leaves):\n  return [{', '.join(items)}]", known)
        gather: Gather = known["gather"]
        return gather


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a batch and its structure, without looking at the leaves."""
    return pytree.tree_flatten(plain_batch(batch))


def _places(model: torch.nn.Module, table: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return, by name, the dict a parameter or buffer stands in and its key there; tied ones once."""
    places: dict[str, tuple[dict[str, Any], str]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in getattr(module, table).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                places[f"{prefix}.{name}" if prefix else name] = (getattr(module, table), name)
    return places


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
        if [tuple(group) for group in groups] != self._names or not same(self._values, values):
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
    """Return what a capture holds constant of a batch, and of the state of torch."""
    objects: dict[int, int] = {}  # a tensor that stands twice in the batch is one input
    storages: dict[int, int] = {}
    facts: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shared = storages.setdefault(leaf.untyped_storage()._cdata, i) if leaf.layout == torch.strided else i
            facts.append((
                type(leaf), leaf.shape, leaf.stride() if leaf.layout == torch.strided else (), leaf.dtype, leaf.device,
                leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), objects.setdefault(id(leaf), i), shared,
                [(name, id(value)) for name, value in vars(leaf).items()],
            ))  # fmt: skip
        else:
            facts.append((type(leaf), leaf))
    return (spec, facts, modes(device_type))
