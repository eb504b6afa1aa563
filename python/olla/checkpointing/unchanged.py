"""Restore the Python state of a model after a step of it was tried."""

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
    Hooks, losses and forward functions also reach closure variables, globals and objects of classes of their own
    package: those that they name are restored, too. Objects of other packages are left alone.

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
