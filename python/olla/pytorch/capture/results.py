"""Results of a step: the structure that the loss function or the model returned, and gradients in ``.grad``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from olla.errors import CaptureError
from olla.pytorch.capture.costs import storage_of

_SYMBOLS = ("SymFloat", "SymInt", "SymBool")  # Python numbers that stand for values of tensors
_CONSTANTS = (bool, int, float, complex, str, type(None))


class _Tensor:
    """Stands where a tensor goes."""


class _Foreign:
    """Stands for a value that belongs to the trace and means nothing at run time, such as a cache of fake tensors."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.kind = type(value).__name__


@dataclass(frozen=True)
class Structure:
    """A nested value with its tensors taken out; numbers, strings and None are part of it.

    Example:
        >>> one, two = torch.ones(1), torch.ones(2)
        >>> Structure.of({"a": one, "b": (two, "text")}).fill([two, one])
        {'a': tensor([1., 1.]), 'b': (tensor([1.]), 'text')}
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Structure:
        """Return the structure of a value."""
        with_paths, spec = pytree.tree_flatten_with_path(value)
        leaves = [
            _Tensor() if isinstance(leaf, torch.Tensor)
            else leaf if type(leaf) in _CONSTANTS
            else _Foreign(pytree.keystr(path), leaf)
            for path, leaf in with_paths
        ]  # fmt: skip
        return cls(spec, tuple(leaves))

    @property
    def num_tensors(self) -> int:
        """How many tensors the structure takes."""
        return sum(isinstance(leaf, _Tensor) for leaf in self.leaves)

    def check(self) -> None:
        """Raise a CaptureError if the value holds what a step cannot give back."""
        foreign = next((leaf for leaf in self.leaves if isinstance(leaf, _Foreign)), None)
        if foreign is not None and foreign.kind in _SYMBOLS:
            raise CaptureError(
                f"the step returns a number read from a tensor (.item(), or a learning rate) at "
                f"{foreign.path or 'its top'}: it is not known yet. Return the tensor, and read it after the step."
            )
        if foreign is not None:
            raise CaptureError(
                f"the step returns a {foreign.kind} at {foreign.path or 'its top'}: expected tensors in dicts, lists "
                "and tuples, or constants. Return what is needed of it from the loss function, or switch it off "
                "(use_cache=False for a transformers model)."
            )

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with tensors in their places, in order."""
        waiting = iter(tensors)
        filled = [next(waiting) if isinstance(leaf, _Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(filled, self.spec)


def with_own_storage(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the outputs that are part of a larger tensor of the step, which they would keep alive.

    Views of parameters, buffers and the batch are not copied, nor are outputs that share memory.
    """
    strided = [t for t in outputs if t.layout is torch.strided]
    count = Counter(storage_of(t) for t in (*strided, *inputs) if t.layout is torch.strided)
    parts = {id(t) for t in strided if t.untyped_storage().nbytes() > t.nbytes and count[storage_of(t)] == 1}
    return [t.clone() if id(t) in parts else t for t in outputs]


@dataclass(frozen=True)
class Gradients:
    """What a captured step does to ``.grad`` of the parameters of its model, by their names.

    After the step, ``cleared`` ones are set to None, and gradients among the outputs are added to ``.grad``.

    Attributes:
        dropped: set to None before the step, which does not read them.
        present: there when the step begins, as its inputs.
        absent: None when the step begins. For parameters in none of these three it does not matter.
        cleared: set to None after the step, which has used them up or leaves another tensor.
        leaves: tensors of the user's own, no parameters of the model, that get a gradient.
    """

    dropped: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)

    def drop(self, parameter: Callable[[str], torch.Tensor]) -> None:
        """Set the ``dropped`` gradients to None; ``parameter`` returns a parameter by its name."""
        for name in self.dropped:
            parameter(name).grad = None

    def change(self, parameter: Callable[[str], torch.Tensor]) -> str:
        """Return, in words, which gradient has come or gone since the capture; empty if none has."""
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
        """Store the gradients of the step in ``.grad``.

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
