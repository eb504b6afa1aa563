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

    Args:
        functions: where to begin: functions, methods, partials or objects that can be called.

    Attributes:
        values: what the variables hold, and attributes of objects as dicts.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self.values: list[Any] = []
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._known: set[int] = set()
        self._todo: list[types.FunctionType] = []
        self._package = ""
        for function in functions:
            self._package = _package(function)
            self._meet(function)
        for function in self._todo:  # which grows
            if len(self._todo) > _MOST_FUNCTIONS:
                break
            self._package = _package(function)
            self._look_around(function)

    def put_back(self) -> None:
        """Let these variables have the values that they had."""
        for cell, value in self._cells.values():
            if _content(cell) is not value:
                cell.cell_contents = value
        for names, name, value in self._globals:
            if names.get(name, _UNSET) is not value:
                names[name] = value

    def _look_around(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            if (value := _content(cell)) is not _UNSET:
                self._cells[id(cell)] = cell, value
                self._meet(value)
        names = function.__globals__
        for name in _names(function.__code__):
            if name in names and not isinstance(names[name], types.ModuleType):
                self._globals.append((names, name, names[name]))
                self._meet(names[name])

    def _meet(self, value: Any) -> None:
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._meet(part)
        elif isinstance(value, types.MethodType):
            self._meet(value.__func__)
            self._meet(value.__self__)
        elif isinstance(value, types.FunctionType):
            if _package(value) not in _LIBRARIES:
                self._todo.append(value)
        elif _is_own(value, self._package):
            self.values.append(vars(value))
            for found in vars(type(value)).values():
                if isinstance(found, types.FunctionType):
                    self._meet(found)
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
