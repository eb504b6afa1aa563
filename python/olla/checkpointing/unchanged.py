"""The Python state of a model stays what it is while a step of it is tried."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from olla.checkpointing.python_state import PythonState
from olla.checkpointing.reached import forwards_of, hooks_of
from olla.pytorch.capture import exclusive


@contextlib.contextmanager
def unchanged(model: torch.nn.Module, leaves: list[Any], loss: Any = None) -> Iterator[None]:
    """Undo what a step does to the attributes of modules, and to lists, dicts, sets and deques in them.

    A step on fake tensors would leave these in histories and caches, and counters would be ahead of the loop's own.
    Hooks, losses and forward functions have more than that at hand: variables around them, globals, and objects of
    classes of their own package; what they name of these is put back, too. Objects of other packages are left alone.

    Args:
        model: that is tried.
        leaves: of its batch, which may get attributes, too.
        loss: the function that is called with the model, if any.
    """
    functions = [*hooks_of(model.modules()), *forwards_of(model), *([] if loss is None else [loss])]
    before = PythonState(model.modules(), functions)
    try:
        with exclusive.unchanged(model, leaves):
            yield
    finally:
        before.put_back()
