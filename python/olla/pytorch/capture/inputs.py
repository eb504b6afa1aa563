"""Inputs of a captured step: fake tensors while it is traced, the user's tensors when it runs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.pytorch.capture import optimizers
from olla.pytorch.sharded.fully import Shards, is_sharded

Gather = Callable[[Sequence[Any]], list[torch.Tensor]]
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


@dataclass(frozen=True)
class Input:
    """One input of a captured step.

    Attributes:
        kind: ``parameter``, ``buffer``, ``optimizer_state``, ``rate`` (of a group), ``gradient`` (that is there before
            the step) or ``input``.
        name: for people: ``"head.weight"``, ``"exp_avg of head.weight"``, ``"lr of group 0"``, ``"batch[input_ids]"``.
        key: name of the parameter or buffer in the model; for ``rate`` and ``input`` the position of the group or of
            the batch leaf.
        entry: for ``optimizer_state``, the entry of ``optimizer.state[parameter]``; for ``rate``, ``lr`` or
            ``momentum``, which stands for the first beta where there are betas.
        exists: False for optimizer state that the optimizer has not created yet.
    """

    kind: str
    name: str
    key: str | int
    entry: str = ""
    exists: bool = True


class Fakes:
    """Fake tensors for real, meta or foreign fake ones: same shape, strides and type, no memory. One per tensor object.

    Args:
        mode: the mode every fake belongs to.
        device: where meta tensors are taken to live.
        shapes: id of a sharded tensor -> shape of this rank's part, which its fake has.
    """

    def __init__(
        self, mode: FakeTensorMode, device: torch.device, shapes: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        self._mode = mode
        self._device = device
        self._shapes = shapes or {}
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake that stands for ``tensor``, the same one every time."""
        if id(tensor) in self._fakes:
            return self._fakes[id(tensor)][1]
        device = self._device if tensor.device.type == "meta" else tensor.device
        with self._mode:
            if (shape := self._shapes.get(id(tensor))) is not None:
                fake = torch.empty(shape, dtype=tensor.dtype, device=device)
            else:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        fake.requires_grad_(tensor.requires_grad)
        self._fakes[id(tensor)] = (tensor, fake)  # holding the tensor keeps its id unique
        return fake


def plain_batch(batch: Any) -> Any:
    """Return a batch with a dict in place of another mapping, such as a tokenizer's answer."""
    is_mapping = isinstance(batch, collections.UserDict | Mapping) and type(batch) is not dict
    return dict(batch) if is_mapping else batch


def batch_names(batch: Any) -> list[str]:
    """Return the names of a batch's leaves, such as ``batch[input_ids]``."""
    try:
        with_paths, _ = pytree.tree_flatten_with_path(plain_batch(batch))
    except ValueError:  # it holds a container that was registered without keys
        return [f"batch[{i}]" for i in range(len(pytree.tree_leaves(plain_batch(batch))))]
    return ["batch" + pytree.keystr(path).replace("'", "") for path, _ in with_paths]


def batch_leaves(batch: Any, names: Sequence[str] | None = None) -> tuple[list[Any], pytree.TreeSpec, list[str]]:
    """Flatten a batch into leaves, their structure and their names, unless these are known.

    Raises:
        CaptureError: a leaf is neither a tensor nor a constant (None, bool, str).
    """
    leaves, spec = pytree.tree_flatten(plain_batch(batch))
    names = batch_names(batch) if names is None else list(names)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor | bool | str | None):
            continue
        if not isinstance(leaf, int | float | complex):
            raise CaptureError(
                f"{name} is a {type(leaf).__name__}: expected tensors in dicts, lists and tuples. Pass what it holds."
            )
        raise CaptureError(
            f"{name} is a {type(leaf).__name__} ({leaf!r:.60}): its value would be frozen into the captured step. "
            "Make it a tensor, for example torch.tensor(value), or fix it inside the loss function."
        )
    return leaves, spec, names


def step_device(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device | None) -> torch.device:
    """Return the one device the step runs on; meta tensors go where the others are, or to ``device``, or to the CPU.

    Raises:
        CaptureError: tensors on two devices, or a kind of tensor that cannot be captured.
    """
    seen: dict[torch.device, str] = {}
    for name, tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_quantized:
            what = type(tensor).__name__ if type(tensor) not in _PLAIN else f"{tensor.layout} tensor"
            raise CaptureError(
                f"{name} is a {what}: only plain dense tensors can be captured. Convert it before the capture."
            )
        if tensor.device.type != "meta":
            seen.setdefault(tensor.device, name)
    if len(seen) > 1:
        places = ", ".join(f"{name} on {where}" for where, name in seen.items())
        raise CaptureError(
            f"the step uses {len(seen)} devices ({places}); one is supported. Move model and batch to one device."
        )
    where = next(iter(seen), device or torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if where.type != "cpu" and (accelerator is None or accelerator.type != where.type):
        # Autograd asks the device itself even for fake tensors, and ends the process where there is none.
        raise CaptureError(
            f"the step is meant for {where}, and PyTorch finds no such device here. "
            "Capture on a machine that has one, or for the CPU: sizes are the same, some operators are not."
        )
    return where


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

    def updated(self) -> list[int]:
        """Return which parameters and buffers the optimizer updates, in its order, by number; -1: another tensor."""
        places = (*self._parameters.values(), *self._buffers.values())
        position = {id(holder[name]): i for i, (holder, name) in enumerate(places)}
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        return [position.get(id(p), -1) for group in groups for p in group["params"]]

    def parameter(self, name: str) -> torch.Tensor:
        """Return one parameter as it is now."""
        holder, last = self._parameters[name]
        parameter: torch.Tensor = holder[last]
        return parameter

    def gatherer(self, inputs: Sequence[Input]) -> Gather:
        """Return a function of the batch's leaves that gives the tensors of a capture's inputs.

        It is generated code, one lookup per tensor without calls of ours between: that is most of a call's own time.
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
                elif entry.kind == "gradient":
                    place += ".grad"
                items.append(place if self._shards is None else f"shard({place})")
        exec(f"def gather(leaves):\n  return [{', '.join(items)}]", known)
        gather: Gather = known["gather"]
        return gather


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


def gather(
    inputs: Sequence[Input], model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None
) -> list[torch.Tensor]:
    """Return the tensors a captured step takes, in its order: the user's own, so that the step changes them in place.

    Optimizer state that does not exist yet is created in the optimizer, as the optimizer's first step would.

    Args:
        inputs: of the captured step.
        model: the captured model, or another one with the same parameters.
        batch: same structure, shapes and types as the captured one.
        optimizer: the captured optimizer, or None if there was none.

    Returns:
        Tensor i is for input i.
    """
    if optimizer is None and (missing := [i.name for i in inputs if i.kind in ("optimizer_state", "rate")]):
        raise ValueError(f"the captured step takes {missing[0]}: pass the optimizer")
    return InputBinding(model, optimizer).gatherer(inputs)(batch_leaves(batch)[0])
