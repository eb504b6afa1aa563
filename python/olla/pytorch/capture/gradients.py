"""What a step finds in ``.grad`` and what it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from olla.errors import CaptureError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class AddsUpError(CaptureError):
    """The step uses gradients that were there before it: they have to be inputs of the captured step."""


@dataclass(frozen=True)
class Gradients:
    """What a captured step does to ``.grad`` of the parameters of its model, by their names.

    Gradients among the outputs are added to what is there behind ``cleared``.

    Attributes:
        dropped: dropped before the step, which does not look at them.
        present: there when the step begins, as its inputs.
        absent: not there when the step begins. Of parameters in none of the three it does not matter.
        cleared: dropped behind the step: it has used them up, or leaves another tensor.
        leaves: tensors of the user's own, no parameters of the model, that get a gradient.
    """

    dropped: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)

    def drop(self, parameter: Callable[[str], torch.Tensor]) -> None:
        """Drop what the step does not look at; ``parameter`` returns a parameter by its name."""
        for name in self.dropped:
            parameter(name).grad = None

    def change(self, parameter: Callable[[str], torch.Tensor]) -> str:
        """Return which gradient is there, or is not, and was not so when the step was captured; empty if none is."""
        for name in self.present:
            if parameter(name).grad is None:
                return f"{name}.grad is None, and was a gradient that the step added to"
        for name in self.absent:
            if parameter(name).grad is not None:
                return f"{name}.grad is a gradient that the step adds to, and was None"
        return ""

    def leave(
        self,
        parameter: Callable[[str], torch.Tensor],
        found: Iterable[tuple[str, bool, torch.Tensor]],
    ) -> int:
        """Leave gradients behind the step.

        Args:
            parameter: returns a parameter by its name.
            found: of each gradient: the name of its parameter or leaf, whether nothing else holds its memory, itself.

        Returns:
            Bytes of the gradients that were added to others: for a moment both are there.
        """
        added_bytes = 0
        for name in self.cleared:
            parameter(name).grad = None
        for name, is_own, gradient in found:
            leaf = parameter(name) if name not in self.leaves else self.leaves[name]
            added_bytes += 0 if leaf.grad is None else gradient.numel() * gradient.element_size()
            accumulate(leaf, gradient, is_own)
        return added_bytes


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor, is_own: bool) -> None:
    """Leave a gradient in ``parameter.grad`` as autograd does: added to what is there, in the parameter's layout.

    ``is_own``: whether nothing else holds the gradient's memory, so that it can be kept as it is.
    """
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif is_own and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class Leaves:
    """Tensors that a step uses beside its inputs, and that get gradients: a scale in a closure, another model.

    While the step is traced their gradients are apart from those that they have.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # each with the gradient that it has

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._leaves

    def meet(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that a function of torch is given.

        Raises:
            CaptureError: its gradient leads out of the step.
        """
        if type(tensor) not in _PLAIN or not tensor.requires_grad or id(tensor) in self._leaves:
            return
        shape = tuple(tensor.shape)
        if not tensor.is_leaf:
            raise CaptureError(
                f"the step uses a tensor of shape {shape} that was computed before it, with gradients: its backward "
                "pass would lead out of the step. Compute it inside the step, or pass it in detached (.detach())."
            )
        if tensor._post_accumulate_grad_hooks:
            raise CaptureError(
                f"a tensor of shape {shape} that the step trains beside its model has a hook that runs once its "
                "gradient is there, which belongs to the model's parameters alone: make it a parameter of the model."
            )
        self._leaves[id(tensor)] = (tensor, tensor.grad)
        tensor.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that they have got, by the names that ``named`` gives them."""
        named = self.named()
        return {name: t.grad for name, t in named.items() if t.grad is not None}

    def named(self) -> dict[str, torch.Tensor]:
        """Return them by name."""
        return {f"leaf {i}": tensor for i, (tensor, _) in enumerate(self._leaves.values())}

    def restore(self) -> None:
        """Give them back the gradients that they have."""
        for tensor, gradient in self._leaves.values():
            tensor.grad = gradient


def require_plain(name: str, parameter: torch.Tensor) -> None:
    """Raise a CaptureError for a gradient that no captured step adds to."""
    gradient = parameter.grad
    assert gradient is not None
    is_dense = type(gradient) in _PLAIN and gradient.layout == torch.strided
    if not is_dense or gradient.requires_grad:
        what = f"a {type(gradient).__name__} ({gradient.layout})" if not is_dense else "part of a graph itself"
        raise CaptureError(f"{name}.grad, which the step adds to, is {what}: drop it (zero_grad()) before the step.")
