"""What a step takes at every call: the user's own tensors, found quickly, and the key that says which capture fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from olla.pytorch import optimizers
from olla.pytorch.inputs import Input, batch_leaves, plain_batch

Sources = Callable[[Sequence[Any]], list[torch.Tensor]]


class Feed:
    """The tensors of a model, its optimizer and its batches.

    Which modules there are is fixed when the feed is made; parameters, buffers and optimizer state may be replaced by
    others at any time.

    Args:
        model: the user's.
        optimizer: the user's, or None.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._modules = list(model.modules())
        # Where each parameter and buffer stands: the dict that holds it, and its name there.
        self._parameters = _places(model, "_parameters")
        self._buffers = _places(model, "_buffers")

    def key(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Hashable:
        """Return what decides which capture fits a batch: everything that a capture holds constant.

        Args:
            leaves: of the batch.
            spec: of the batch.
        """
        first: dict[int, int] = {}  # a tensor that stands twice in the batch is one input
        inputs = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, first.setdefault(id(leaf), i))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for i, leaf in enumerate(leaves)
        )
        state = tuple([(p.requires_grad, p.dtype, p.device, p.shape, _num_hooks(p)) for p in self.parameters()])
        training = tuple([module.training for module in self._modules])
        groups = () if self.optimizer is None else tuple(_constants(g) for g in self.optimizer.param_groups)
        autocast = [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", self.device.type}
        ]
        settings = (*autocast, torch.are_deterministic_algorithms_enabled())  # some operators take another way
        return str(spec), inputs, state, training, groups, settings

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters as they are now."""
        return [holder[name] for holder, name in self._parameters.values()]

    def parameter(self, name: str) -> torch.Tensor:
        """Return one parameter as it is now."""
        holder, last = self._parameters[name]
        parameter: torch.Tensor = holder[last]
        return parameter

    @property
    def device(self) -> torch.device:
        """Where the model is; the CPU if it has neither parameters nor buffers."""
        for holder, name in [*self._parameters.values(), *self._buffers.values()]:
            return torch.device(holder[name].device)
        return torch.device("cpu")

    def sources(self, inputs: Sequence[Input]) -> Sources:
        """Return a function of the batch's leaves that gives the tensors of a capture's inputs.

        It is generated: a lookup per tensor, with nothing of ours in between, is the larger part of a call's own time.
        """
        known: dict[str, Any] = {"state_of": optimizers.parameter_state, "rate": optimizers.rate_tensor}
        known |= {"optimizer": self.optimizer}
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
                items.append(place)
        exec(f"def gather(leaves):\n  return [{', '.join(items)}]", known)
        gather: Sources = known["gather"]
        return gather


def flatten(batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a batch and its structure, without looking at the leaves."""
    return pytree.tree_flatten(plain_batch(batch))


def check(batch: Any) -> None:
    """Raise a CaptureError for a batch that holds neither tensors nor constants."""
    batch_leaves(batch)


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


def _num_hooks(parameter: torch.Tensor) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _constants(group: dict[str, Any]) -> Hashable:
    """Return the settings of a parameter group that a capture holds constant."""
    settings = [(k, str(v)) for k, v in optimizers.constants(group).items()]
    return (*settings, isinstance(group["lr"], torch.Tensor), tuple(map(id, group["params"])))
