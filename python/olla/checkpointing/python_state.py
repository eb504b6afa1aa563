"""Python state of a model: attributes of modules, containers in them, and variables that hooks and losses reach."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch

from olla.checkpointing.reached import Reached

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


class PythonState:
    """Attributes of modules, and what lists, dicts, sets and deques hold, as they are when this is made.

    Args:
        modules: whose attributes it has, and the containers in these; not the tables of Module itself.
        functions: whose variables and objects it has, see `Reached`.

    Example:
        >>> module = torch.nn.Linear(2, 2)
        >>> module.seen = [1]
        >>> state = PythonState([module])
        >>> module.seen.append(2)
        >>> state.put_back()
        >>> module.seen
        [1]
    """

    def __init__(self, modules: Iterable[torch.nn.Module], functions: Iterable[Callable[..., Any]] = ()) -> None:
        self._attributes = [(vars(m), _own(vars(m))) for m in modules]
        self._reached = Reached(functions)
        values = [value for _, own in self._attributes for value in own.values()] + self._reached.values
        self._held = [(container, container.copy()) for container in _containers(values)]

    def has_changed(self) -> bool:
        """Whether attributes or containers are others now; variables of functions are not looked at."""
        return any(_ids(_own(table)) != _ids(own) for table, own in self._attributes) or any(
            _ids(held) != _ids(before) for held, before in self._held
        )

    def put_back(self) -> None:
        """Let all of it be what it was."""
        for table, own in self._attributes:
            for name in _own(table).keys() - own.keys():
                del table[name]
            table.update(own)
        self._reached.put_back()
        for held, before in self._held:
            if _ids(held) != _ids(before):
                held.clear()
                held.update(before) if hasattr(held, "update") else held.extend(before)


def _own(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in _OF_MODULES and name != "forward"}


def _containers(values: list[Any]) -> list[Any]:
    """Return the containers among values, and those inside of them."""
    found: list[Any] = []
    known: set[int] = set()
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


def _ids(container: Any) -> list[int]:
    """Return what tells which objects a container holds, keys of a dict included; a set has no order."""
    if isinstance(container, dict):
        return [id(x) for item in container.items() for x in item]
    return sorted(map(id, container)) if isinstance(container, set) else [*map(id, container)]
