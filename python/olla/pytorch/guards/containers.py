"""Dicts, lists and cells that a step read, each with its contents at that time: to compare, and to undo changes."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from olla.errors import CaptureError
from olla.pytorch.guards.attribute_names import AttributeNames, FirstUse
from olla.pytorch.guards.code import module_origin
from olla.pytorch.guards.object_parts import no_modes
from olla.pytorch.guards.values import MISSING, equal, same


class Holds(Enum):
    """What the entries of a container are, and so what counts as a change."""

    ITEMS = "items"  # data: every entry counts
    ATTRIBUTES = "attributes"  # those that some code has named count
    HOOKS = "hooks"  # their keys are numbers that count up: values count, in order
    NAMES = "names"  # globals, of which some are watched: each of these counts
    INPUTS = "inputs"  # parameters and buffers: others may take their places


@dataclass(slots=True)
class WatchedContainer:
    """A container and what it held."""

    container: dict[Any, Any] | list[Any]
    # All of a dict as (key, value, key, value, ...), all of a list, or the keys of a dict that count.
    expected: tuple[Any, ...] | dict[Any, Any]
    holds: Holds
    path: str  # for people
    owner: str = "user"  # the origin of the code that it belongs to; "class" for the attributes of a class

    @classmethod
    def of(
        cls, container: dict[Any, Any] | list[Any], holds: Holds, path: str, owner: str = "user"
    ) -> WatchedContainer:
        """Return a container with what it holds now."""
        return cls(container, contents(container), holds, path, owner)

    def change(self, counts: Callable[[str], bool]) -> str:
        """Return, in words, an entry that is not as expected; empty: none. ``counts``: whether an attribute is guarded.

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
    """A value that is read by a function: of a cell, a set, a closed object, a variable of the environment."""

    read: Callable[[], Any]
    expected: Any  # what it returned
    path: str  # for people
    write: Callable[[Any], None] | None = None  # sets the value; None: it cannot be set

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


def reader(read: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Return a function that reads a variable of an enclosing function or a slot, which may be empty."""

    def read_or_miss() -> Any:
        try:
            return read(*arguments)
        except (AttributeError, ValueError):
            return MISSING

    return read_or_miss


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


class Containers:
    """Containers, values and tensors as they were before the step could change them.

    Args:
        names: says which attributes count.

    Attributes:
        watched: dicts and lists.
        probes: values that are read by a function.
    """

    def __init__(self, names: AttributeNames) -> None:
        self.watched: list[WatchedContainer] = []
        self.probes: list[Probe] = []
        self.lost = ""  # what undo could not put back, in words
        self._names = names
        self._keys: dict[int, WatchedContainer] = {}  # of scopes and classes
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors, with what they held

    def watch(self, container: dict[Any, Any] | list[Any], holds: Holds, path: str, owner: str = "user") -> None:
        """Note what a container holds; for the arguments see `WatchedContainer`."""
        self.watched.append(WatchedContainer.of(container, holds, path, owner))

    def watch_data(self, container: dict[Any, Any] | list[Any], holds: Holds, path: str) -> None:
        """Note what a container of the user holds, and in which order."""
        self.watch(container, holds, path)
        if isinstance(container, collections.OrderedDict) and container:  # has an order beside that of a dict
            self.probe(functools.partial(tuple, container), f"the order of {path}")

    def watch_class(self, attributes: dict[str, Any], path: str, owner: str) -> bool:
        """Note the attributes of a class; return False where they already are."""
        if id(attributes) in self._keys:
            return False
        self.watch(attributes, Holds.ATTRIBUTES, path, owner)
        self._keys[id(attributes)] = self.watched[-1]
        return True

    def watch_key(self, scope: dict[str, Any], name: str, path: str) -> None:
        """Note one global of a scope, or that there is none of this name."""
        watched = self._keys.get(id(scope))
        if watched is None:
            owner = module_origin(str(scope.get("__name__", scope.get("__module__", ""))))
            watched = self._keys[id(scope)] = WatchedContainer(scope, {}, Holds.NAMES, path, owner)
            self.watched.append(watched)
        assert isinstance(watched.expected, dict)
        watched.expected.setdefault(name, scope.get(name, MISSING))

    def probe(self, read: Callable[[], Any], path: str, write: Callable[[Any], None] | None = None) -> None:
        """Note a value that is read by a function; for the arguments see `Probe`."""
        self.probes.append(Probe(read, read(), path, write))

    def save(self, tensor: torch.Tensor) -> None:
        """Note what a tensor holds that a trace may change for real: it computes with constants."""
        if id(tensor) not in self._saved and tensor.layout == torch.strided:
            with no_modes():
                self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def check(self, first_use: FirstUse, is_constant: Callable[[Any], bool]) -> None:
        """Raise a CaptureError if the step has changed what it read; for is_constant see `Reads.check`."""
        for watched in self.watched:
            self._check(watched, first_use, is_constant)
        for probe in self.probes:
            if (what := probe.change()) and not is_constant(probe.read()):
                raise _changed_itself(what)

    def _check(self, watched: WatchedContainer, first_use: FirstUse, is_constant: Callable[[Any], bool]) -> None:
        # A trace replaces functions of torch.
        if watched.owner in ("torch", "stdlib", "library") or watched.holds is Holds.INPUTS:
            return
        if not (what := watched.change(self._names.counts)):
            return
        if watched.holds in (Holds.ATTRIBUTES, Holds.NAMES):
            assert isinstance(watched.container, dict)
            is_lazy = watched.owner != "user"  # a library fills its caches at first use
            if not any(
                (watched.holds is not Holds.ATTRIBUTES or self._names.counts(key))
                and not same(before, now)
                and not first_use.is_set_first(watched.container, key)
                and not ((before is None or before is MISSING) and (is_lazy or is_constant(now)))
                for key, before, now in watched.changes()
            ):
                return
        raise _changed_itself(what)

    def undo(self) -> None:
        """Put back what lists, dicts, objects, variables and tensors held."""
        for watched in self.watched:
            if watched.owner in ("installed", "class"):
                watched.renew()  # a library has filled its caches
            elif watched.owner in ("user", "library") and watched.holds is not Holds.INPUTS:
                watched.undo()  # of torch's objects too: what a GradScaler made is a stand-in
        for probe in self.probes:
            probe.undo()
            self.lost = self.lost or probe.change()
        with no_modes(), torch.no_grad():
            for tensor, before in self._saved.values():
                if not torch.equal(tensor, before):
                    tensor.copy_(before)

    def forget(self) -> None:
        """Let go of what only the capture itself needed."""
        self._keys.clear()
        self._saved.clear()


def _changed_itself(what: str) -> CaptureError:
    return CaptureError(
        f"the step itself changes what it reads from Python: {what}. A planned step runs operators, not Python code, "
        "and would not change it again: keep it in a tensor (a buffer of the model), or change it outside the step."
    )
