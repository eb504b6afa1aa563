"""The Python state of a model stays what it is while a step of it is tried."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from olla.checkpointing.reached import Reached, forwards_of, hooks_of
from olla.pytorch.capture import exclusive

_CONTAINERS = {
    list,
    dict,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
}
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_MOST_CONTAINERS = 10_000  # what holds more than these is data, in which a forward pass only reads


@contextlib.contextmanager
def unchanged(model: torch.nn.Module, leaves: list[Any], loss: Any = None) -> Iterator[None]:
    """Undo what a step does to the attributes of modules, and to lists, dicts, sets and deques in them.

    A step on fake tensors would leave these in histories and caches, and counters would be ahead of the loop's own.
    Hooks, losses and forward functions have more than that at hand: variables around them, globals, and objects of
    classes of their own package; these are put back, too. What objects of other packages hold is not looked at.

    Args:
        model: that is tried.
        leaves: of its batch, which may get attributes, too.
        loss: the function that is called with the model, if any.
    """
    functions = [*hooks_of(model), *forwards_of(model), *([] if loss is None else [loss])]
    reached = Reached(functions)
    saved = [(held, held.copy()) for held in _containers(model, reached.values)]
    try:
        with exclusive.unchanged(model, leaves), reached.kept():
            yield
    finally:
        for held, before in saved:
            if _held(held) != _held(before):
                held.clear()
                held.update(before) if hasattr(held, "update") else held.extend(before)


def _containers(model: torch.nn.Module, others: list[Any]) -> list[Any]:
    """Return the containers in attributes of modules and among other values, and those inside of them.

    The tables of Module itself are not among them.
    """
    found: list[Any] = []
    known: set[int] = set()
    values = [value for m in model.modules() for name, value in vars(m).items() if name not in _OF_MODULES] + others
    for value in values:  # which grows: those nearest to the modules come first
        if type(value) not in {*_CONTAINERS, tuple} or id(value) in known:
            continue
        if len(found) == _MOST_CONTAINERS:
            break
        known.add(id(value))
        if type(value) is not tuple:
            found.append(value)
        if len(value) <= _MOST_CONTAINERS:
            values += value.values() if isinstance(value, dict) else value
    return found


def _held(container: Any) -> list[int]:
    """Return what tells which objects a container holds, keys of a dict included; a set has no order."""
    if isinstance(container, dict):
        return [id(x) for item in container.items() for x in item]
    return sorted(map(id, container)) if isinstance(container, set) else [*map(id, container)]
