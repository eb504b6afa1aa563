"""Choose checkpoints at the first call of a model that trains, by the batch of that call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from olla.checkpointing.checkpoint import checkpoint, remove
from olla.checkpointing.ranks import train_together
from olla.checkpointing.table import Checkpoints
from olla.errors import CaptureError

_LARGER = 1.05  # times as many bytes as the largest batch so far: the choice is made anew
_MOST_CHOICES = 8  # where batches grow again and again


class AtFirstBatch:
    """Chooses which modules of a model are checkpointed at its first call that trains, and again for larger batches.

    Where several processes train, the first batch of the first one decides.

    Args:
        model: of a training that goes on in its own loop.
        options: of `olla.checkpoint`. An optimizer of which too little is known is left out, with a warning.
        tell: is told of every choice before the call goes on.
    """

    def __init__(self, model: torch.nn.Module, options: dict[str, Any], tell: Callable[[Checkpoints], None]) -> None:
        self._model, self._options, self._tell = model, dict(options), tell
        self._num_bytes = self._num_choices = 0
        self._is_choosing = False
        self._hook = model.register_forward_pre_hook(self._before, with_kwargs=True)

    def close(self) -> None:
        """Undo the choice, and make no more."""
        self._hook.remove()
        remove(self._model)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_choosing or not (module.training and torch.is_grad_enabled()):
            return
        leaves = pytree.tree_leaves((args, kwargs))
        num_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        # All ranks have to choose together: they get their first batch at the same call, but not a larger one.
        most = 1 if train_together() else _MOST_CHOICES
        if num_bytes <= _LARGER * self._num_bytes or self._num_choices >= most:
            return
        self._num_bytes, self._num_choices = num_bytes, self._num_choices + 1
        self._is_choosing = True
        try:
            chosen = self._choose(_batch(module, args, kwargs))
        finally:
            self._is_choosing = False
        self._tell(chosen)

    def _choose(self, batch: Any) -> Checkpoints:
        try:
            return checkpoint(self._model, batch, **self._options)
        except CaptureError as error:
            if self._options.pop("optimizer", None) is None:
                raise
            chosen = checkpoint(self._model, batch, **self._options)
            warnings.warn(f"olla: the budget is kept without the optimizer: {error}", stacklevel=2)
            return chosen


def _batch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as `olla.checkpoint` takes them."""
    if not kwargs:
        return args
    if args:
        names = [p.name for p in inspect.signature(type(module).forward).parameters.values()][1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    return kwargs
