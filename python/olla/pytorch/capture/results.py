"""What a step gives back: the structure that the loss function or the model returned, around the step's own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from olla.errors import CaptureError

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
    """A value in which tensors have been taken out of their places; numbers, strings and None are part of it.

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
