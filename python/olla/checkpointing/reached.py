"""Variables that functions can reach: those around them, globals that they name, and attributes of their objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_LIBRARIES = {"torch", "numpy", "builtins", "functools", "logging", "typing", "olla"}
_MOST_FUNCTIONS = 10_000
_UNSET = object()


class Reached:
    """Variables and objects that functions may change: those of their own package, at any depth of calls by name.

    Of an object, only attributes and methods that the code names: what else it holds may be in use on other threads.

    Args:
        functions: where to begin: functions, methods, partials or objects that can be called.

    Attributes:
        values: what the variables and attributes hold.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self.values: list[Any] = []
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._named: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}  # globals and attributes
        self._known: dict[int, Any] = {}
        self._todo: list[types.FunctionType] = []
        self._objects: list[Any] = []
        self._names: set[str] = set()
        for function in functions:
            self._meet(function, _package(function), is_called=True)
        num_done = 0
        while num_done < min(len(self._todo), _MOST_FUNCTIONS):
            for function in self._todo[num_done:]:
                num_done += 1
                self._look_around(function)
            for found in self._objects:  # which grows
                self._look_into(found)
        self._known.clear()  # the rest of it may be let go meanwhile

    def put_back(self) -> None:
        """Let these variables and attributes have the values that they had."""
        for cell, value in self._cells.values():
            if _content(cell) is not value:
                cell.cell_contents = value
        for (_, name), (table, value) in self._named.items():
            if value is _UNSET:
                table.pop(name, None)
            elif table.get(name, _UNSET) is not value:
                table[name] = value

    def _look_around(self, function: types.FunctionType) -> None:
        package = _package(function)
        for cell in function.__closure__ or ():
            if (value := _content(cell)) is not _UNSET:
                self._cells.setdefault(id(cell), (cell, value))
                self._meet(value, package)
        table = function.__globals__
        for name in _names(function.__code__):
            self._names.add(name)
            if name in table and not isinstance(table[name], types.ModuleType):
                self._note(table, name)
                self._meet(table[name], package)

    def _look_into(self, found: Any) -> None:
        """Look at what the code names of an object."""
        package = _package(type(found))
        for name in self._names:
            method = getattr(type(found), name, None)
            if isinstance(method, types.FunctionType):
                self._meet(method, package)
            self._note(vars(found), name)
            if name in vars(found):
                self._meet(vars(found)[name], package)

    def _note(self, table: dict[str, Any], name: str) -> None:
        self._named.setdefault((id(table), name), (table, table.get(name, _UNSET)))

    def _meet(self, value: Any, package: str, *, is_called: bool = False) -> None:
        if id(value) in self._known:
            return
        self._known[id(value)] = value  # holding references keeps ids unique
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._meet(part, package, is_called=is_called and part is value.func)
        elif isinstance(value, types.MethodType):
            self._meet(value.__func__, package)
            self._meet(value.__self__, package)
        elif isinstance(value, types.FunctionType):
            if _package(value) not in _LIBRARIES:
                self._todo.append(value)
        elif _is_own(value, package):
            self._objects.append(value)
            if is_called:
                self._meet(type(value).__call__, package)
        else:
            self.values.append(value)


def hooks_of(modules: Iterable[torch.nn.Module]) -> list[Callable[..., Any]]:
    """Return the hooks of the forward and backward calls of modules, but for torch's own."""
    tables = [table for m in modules for table in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    return [hook for table in tables if table for hook in table.values() if _package(hook) != "torch"]


def forwards_of(model: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return what a model's modules, or their classes, have for ``forward``."""
    found = [vars(m).get("forward") or getattr(type(m), "forward", None) for m in model.modules()]
    return list({id(forward): forward for forward in found if forward is not None}.values())


def _is_own(value: Any, package: str) -> bool:
    """Whether an object is of a class of this package, with attributes to change; modules are looked at elsewhere."""
    kind = type(value)
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, type | torch.nn.Module | torch.Tensor)
        and _package(kind) == package
        and package not in _LIBRARIES
    )


def _package(value: Any) -> str:
    name = getattr(value, "__module__", None) or type(value).__module__
    return str(name).partition(".")[0]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty so far
        return _UNSET


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in the code of functions inside of it."""
    todo = [code]
    for found in todo:  # which grows
        yield from found.co_names
        todo += [c for c in found.co_consts if isinstance(c, types.CodeType)]
