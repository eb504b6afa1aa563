"""The Python state of a model stays what it is while a step of it is tried."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

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
_MOST_CONTAINERS = 10_000  # what holds more than these is data, which a forward pass only reads


@contextlib.contextmanager
def unchanged(model: torch.nn.Module, leaves: list[Any]) -> Iterator[None]:
    """Undo what a forward pass does to the attributes of modules, and to lists, dicts, sets and deques in them.

    A step on fake tensors would leave these in histories and caches, and counters would be ahead of the loop's own.
    What other objects hold is not looked at.

    Args:
        model: that is tried.
        leaves: of its batch, which may get attributes, too.
    """
    saved = [(held, held.copy()) for held in _containers(model)]
    try:
        with exclusive.unchanged(model, leaves):
            yield
    finally:
        for held, before in saved:
            if _held(held) != _held(before):
                held.clear()
                held.update(before) if hasattr(held, "update") else held.extend(before)


def _containers(model: torch.nn.Module) -> list[Any]:
    """Return the containers in attributes of modules, and those inside of them; not the tables of Module itself."""
    found: list[Any] = []
    known: set[int] = set()
    values = [value for m in model.modules() for name, value in vars(m).items() if name not in _OF_MODULES]
    for value in values:  # which grows: those nearest to the modules come first
        if type(value) not in {*_CONTAINERS, tuple} or id(value) in known:
            continue
        if len(found) == _MOST_CONTAINERS:
            break
        known.add(id(value))
        if type(value) is not tuple:
            found.append(value)
        values += value.values() if isinstance(value, dict) else value
    return found


def _held(container: Any) -> list[int]:
    """Return what tells which objects a container holds, keys of a dict included; a set has no order."""
    if isinstance(container, dict):
        return [id(x) for item in container.items() for x in item]
    return sorted(map(id, container)) if isinstance(container, set) else [*map(id, container)]
