"""Places that hold what a step read - dicts, lists, cells, closed objects - with what they held before it was read."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from olla.pytorch.guards.values import MISSING, equal, same


class Holds(Enum):
    """What the entries of a container are, and so what counts as a change."""

    ITEMS = "items"  # data: every entry counts
    ATTRIBUTES = "attributes"  # those that some code has named count
    HOOKS = "hooks"  # their keys are numbers that count up: values count, in order
    NAMES = "names"  # globals, of which some are watched: each of these counts
    INPUTS = "inputs"  # parameters and buffers: others may take their places


@dataclass(slots=True)
class Watched:
    """A container and what it held.

    Attributes:
        container: a dict or a list.
        expected: all of a dict as (key, value, key, value, ...), all of a list, or the keys of a dict that count.
        holds: what the entries are.
        path: for people.
        owner: the origin of the code that the container belongs to; "class" for the attributes of a class.
    """

    container: dict[Any, Any] | list[Any]
    expected: tuple[Any, ...] | dict[Any, Any]
    holds: Holds
    path: str
    owner: str = "user"

    @classmethod
    def of(cls, container: dict[Any, Any] | list[Any], holds: Holds, path: str, owner: str = "user") -> Watched:
        """Return a container with what it holds now."""
        return cls(container, contents(container), holds, path, owner)

    def change(self, counts: Callable[[str], bool]) -> str:
        """Return what is other than expected, in words; empty where nothing is that counts.

        Args:
            counts: whether an attribute of this name does.

        Complexity: O(entries).
        """
        if isinstance(self.container, list):
            return self._item_change(list(self.expected), list(self.container))
        old, new = self._dicts()
        if self.holds is Holds.HOOKS:
            return self._item_change(list(old.values()), list(new.values()))
        if self.holds is Holds.ITEMS and list(old) != list(new):
            return f"the keys of {self.path} changed"
        if self.holds is Holds.INPUTS:
            return self._input_change(old, new)
        for key, before, now in self.changes():
            if (self.holds is not Holds.ATTRIBUTES or counts(key)) and not same(before, now):
                return f"{self._place(key)} was {shown(before)} and is {shown(now)}"
        return ""

    def _item_change(self, old: list[Any], new: list[Any]) -> str:
        if len(old) != len(new):
            return f"{self.path} had {len(old)} entries and has {len(new)}"
        for i, (before, now) in enumerate(zip(old, new, strict=True)):
            if not same(before, now):
                return f"{self.path}[{i}] was {shown(before)} and is {shown(now)}"
        return ""

    def _input_change(self, old: dict[Any, Any], new: dict[Any, Any]) -> str:
        if list(old) != list(new):
            before, now = (", ".join(map(str, names)) or "none" for names in (old, new))
            return f"the tensors of {self.path} were {before}, and are {now}"
        for name, tensor in new.items():
            if (tensor is None) != (old[name] is None):
                return f"{self.path}.{name} was {shown(old[name])} and is {shown(tensor)}"
        return ""

    def _place(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.holds in (Holds.ATTRIBUTES, Holds.NAMES) else f"{self.path}[{key!r:.40}]"

    def _dicts(self) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Return what was in a dict and what is, of the keys that count."""
        present = dict(dict.items(self.container))  # type: ignore[arg-type]
        if isinstance(self.expected, dict):
            return self.expected, {k: present.get(k, MISSING) for k in self.expected}
        return entries(self.expected), present

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Return key, value before and value now of the entries of a dict that hold another object than expected."""
        old, new = self._dicts()
        for key in {**old, **new}:
            before, now = old.get(key, MISSING), new.get(key, MISSING)
            if before is not now:
                yield key, before, now

    def undo(self) -> None:
        """Put back what the container held, as far as it holds other objects now."""
        if isinstance(self.container, list):
            if list(map(id, contents(self.container))) != list(map(id, self.expected)):
                self.container[:] = self.expected
            return
        for key, before, _ in self.changes():
            if before is MISSING:
                del self.container[key]
            else:
                self.container[key] = before
        if isinstance(self.expected, tuple) and list(dict.keys(self.container)) != list(self.expected[::2]):
            self.container.clear()
            self.container.update(entries(self.expected))  # in the old order

    def renew(self) -> None:
        """Expect what the container holds now."""
        self.expected = self._dicts()[1] if isinstance(self.expected, dict) else contents(self.container)


@dataclass(slots=True)
class Probe:
    """A value that is read by a function: of a cell, a set, a closed object, a variable of the environment.

    Attributes:
        read: returns the value.
        expected: what it returned.
        path: for people.
        write: sets the value; None: it cannot be set.
    """

    read: Callable[[], Any]
    expected: Any
    path: str
    write: Callable[[Any], None] | None = None

    def undo(self) -> None:
        """Put back the value that was there."""
        if self.write is not None and self.read() is not self.expected:
            self.write(self.expected)

    def change(self) -> str:
        """Return what is other than expected, in words; empty where nothing is."""
        try:
            now = self.read()
        except Exception as error:  # whatever a user's object may do
            return f"{self.path} cannot be read any more: {type(error).__name__}"
        if equal(self.expected, now):
            return ""
        hidden = isinstance(now, bytes) or isinstance(self.expected, bytes)
        values = "" if hidden else f": it was {shown(self.expected)} and is {shown(now)}"
        return f"{self.path} changed{values}"


def contents(container: dict[Any, Any] | list[Any]) -> tuple[Any, ...]:
    """Return what a dict or list holds, flat."""
    if isinstance(container, dict):
        return tuple(part for item in dict.items(container) for part in item)
    return tuple(list.__iter__(container))


def entries(flat: tuple[Any, ...]) -> dict[Any, Any]:
    """Return the entries of a dict that ``contents`` made flat."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def cell_reader(cell: types.CellType) -> Callable[[], Any]:
    """Return a function that reads a variable of an enclosing function."""

    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return MISSING

    return read


def cell_writer(cell: types.CellType) -> Callable[[Any], None]:
    """Return a function that sets a variable of an enclosing function."""

    def write(value: Any) -> None:
        if value is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    return write


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    if value is MISSING:
        return "not there"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return f"{value!r:.60}"
    name = getattr(value, "__qualname__", None)
    return f"another {type(value).__name__}" if name is None else f"{name:.60}"
