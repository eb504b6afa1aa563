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
            if len(held) != len(before) or any(a is not b for a, b in zip(_items(held), _items(before), strict=True)):
                held.clear()
                held.update(before) if hasattr(held, "update") else held.extend(before)


def _containers(model: torch.nn.Module) -> list[Any]:
    """Return the containers in attributes of modules, and those inside of them."""
    found: list[Any] = []
    known: set[int] = set()
    waiting = [value for module in model.modules() for value in vars(module).values()]
    while waiting and len(found) < _MOST_CONTAINERS:
        value = waiting.pop()
        if type(value) not in {*_CONTAINERS, tuple} or id(value) in known:
            continue
        known.add(id(value))
        if type(value) is not tuple:
            found.append(value)
        waiting += value.values() if isinstance(value, dict) else value
    return found


def _items(held: Any) -> Iterator[Any]:
    """Return what a container holds, keys of a dict included."""
    if isinstance(held, dict):
        for key, value in held.items():
            yield key
            yield value
    else:
        yield from held
