"""What a step takes at every call: the user's own tensors, found quickly, and the key that says which capture fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from olla.pytorch import optimizers
from olla.pytorch.inputs import Input, batch_leaves, plain_batch

Source = Callable[[Sequence[Any]], torch.Tensor]


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

    def sources(self, inputs: Sequence[Input]) -> list[Source]:
        """Return, for each input of a capture, the function of the batch's leaves that gives its tensor."""
        return [self._source(i) for i in inputs]

    def _source(self, entry: Input) -> Source:
        if entry.kind in ("parameter", "buffer"):
            holder, name = (self._parameters if entry.kind == "parameter" else self._buffers)[str(entry.key)]
            return lambda leaves: holder[name]
        if entry.kind == "input":
            position = int(entry.key)
            return lambda leaves: leaves[position]
        optimizer = self.optimizer
        assert optimizer is not None
        if entry.kind == "rate":
            number = int(entry.key)
            return lambda leaves: optimizers.rate_tensor(optimizer.param_groups[number], entry.entry)
        holder, name = self._parameters[str(entry.key)]
        return lambda leaves: optimizers.state_entry(optimizer, holder[name], entry.entry)


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
