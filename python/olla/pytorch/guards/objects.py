"""Objects that a step may read, and what they lead to: data as a whole, attributes by the names that code uses."""

from __future__ import annotations

import builtins
import collections
import functools
import gc
import logging
import operator
import queue
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from olla.errors import CaptureError
from olla.pytorch.guards import clocks, object_parts
from olla.pytorch.guards.attribute_names import HOOK_TABLES, INNER_TABLES, AttributeNames
from olla.pytorch.guards.code import is_foundation, module_origin
from olla.pytorch.guards.containers import Containers, Holds, WatchedContainer, cell_writer, reader
from olla.pytorch.guards.generators import Generators
from olla.pytorch.guards.values import closed_state, closed_writer, is_one_way, is_plain

_FUNCTION_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
# Of an optimizer: olla.pytorch.binding compares its settings, its state is input, the rest are marks of schedulers.
_OPTIMIZER_APART = ("state", "param_groups", "step", "_opt_called", "_step_count", "_zero_grad_profile_name")
# Classes of torch and Python whose objects hold nothing that a step computes with, and the exceptions.
_BESIDE = {
    "torch", "abc", "ast", "asyncio", "concurrent", "dis", "enum", "importlib", "_frozen_importlib", "inspect",
    "logging", "re", "typing", "unittest", "warnings",
}  # fmt: skip
_WITHIN = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.utils.data.", "torch.amp.", "torch.cuda.amp.")
_LOGGED = operator.attrgetter("level", "disabled", "manager.disable", "parent")
_CONTAINERS = (list, dict, tuple, set, frozenset, collections.deque)


class Objects:
    """The objects that a step may read, reached from a few roots.

    Args:
        model: its parameters and buffers are inputs of the step.
        inputs: tensors whose values are inputs of the step.

    Attributes:
        names: of guarded attributes.
        places: containers and values that were read.
        constants: tensors that are no inputs.
        objects: those whose class or attribute dict may be replaced, each with that dict, or None.
        generators: of random numbers.
        problems: what can be neither compared nor repeated, in words.
    """

    def __init__(self, model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        self.names = AttributeNames()
        self.places = Containers(self.names)
        self.constants: list[torch.Tensor] = []
        self.objects: list[tuple[Any, dict[str, Any] | None]] = []
        self.generators = Generators()
        self.problems: list[str] = []
        self._inputs = {id(t): t for t in inputs}
        self._of_model = {id(m) for m in model.modules()}
        self._seen: dict[int, Any] = {**self._inputs, id(vars(builtins)): vars(builtins)}
        self._queue: list[tuple[Any, str]] = []
        # By the id of their code: equal code of two files reads two files' globals, and hashing code takes long.
        self._functions: dict[int, list[tuple[types.FunctionType, str]]] = {}
        self._entered: dict[int, types.CodeType] = {}
        self._elsewhere: list[types.FunctionType] = []  # what may run on other threads

    def require_comparable(self) -> None:
        """Raise a CaptureError for what can be neither compared nor repeated."""
        if self.problems:
            raise CaptureError(
                f"the step reads {self.problems[0]}, which would be frozen into the captured step. Read it before the "
                "step, and pass it in with the batch, as a tensor."
            )

    def _learn(self, names: Iterable[str]) -> None:
        """Guard attributes of these names."""
        for read, path in self.names.learn(names):
            self._reach(read(), path)

    def _reach(self, value: Any, path: str) -> None:
        if isinstance(value, str) and len(value) < 80 and value not in self.names.known:
            self._learn((str(value),))
        if not is_plain(value) and id(value) not in self._seen:
            self._seen[id(value)] = value  # holding the object keeps its id unique
            self._queue.append((value, path))

    def _reach_hook(self, function: Any, path: str) -> None:
        self._reach(function, path)
        while (inner := getattr(function, "__func__", getattr(function, "func", None))) is not None:
            function = inner  # of a method or a partial function
        if isinstance(function, types.FunctionType):
            self._elsewhere.append(function)

    def _drain(self) -> None:
        while self._queue:
            value, path = self._queue.pop()
            try:
                self._visit(value, path)
            except ValueError as what:
                self.problems.append(f"{path}, {what}")

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor):
                self.constants.append(value)
                if value.numel() == 1:
                    self.places.save(value)
        elif isinstance(value, torch.Generator):
            self.generators.add(value)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.ModuleType):
            if module_origin(value.__name__) == "user":
                self._attributes(vars(value), path)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, torch.nn.Module):
            self._layer(value, path)
        elif clocks.is_clock(value):
            self.problems.append(f"{clocks.WHAT} ({path})")
        elif parts := object_parts.parts_of(value):
            for part in parts:
                self._reach(part, path)
        else:
            self._object(value, path)

    def _function(self, function: types.FunctionType, path: str) -> None:
        self._functions.setdefault(id(function.__code__), []).append((function, path))
        if id(function.__code__) in self._entered:
            self._closure(function, path)
        self._reach(getattr(function, "__wrapped__", None), path)

    def _closure(self, function: types.FunctionType, path: str) -> None:
        """Watch what a function that is entered reads beside its arguments."""
        is_user = object_parts.code_origin(function.__code__, function.__globals__) == "user"
        if is_user:
            self.places.probe(functools.partial(_FUNCTION_PARTS, function), path)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                read = reader(getattr, cell, "cell_contents")
                self.places.probe(read, f"the variable {name} of {path}", cell_writer(cell))
                self._reach(read(), f"the variable {name} of {path}")
        for value in function.__defaults__ or ():
            self._reach(value, f"a default of {path}")
        for name, value in (function.__kwdefaults__ or {}).items():
            self._reach(value, f"the default {name} of {path}")
        if function.__dict__ or is_user:
            self._attributes(function.__dict__, path)

    def _layer(self, module: torch.nn.Module, path: str) -> None:
        """Watch a module: its attributes, its tables of tensors, children and hooks."""
        attributes = module.__dict__
        tables = {n: attributes[n] for n in (*INNER_TABLES, *HOOK_TABLES) if isinstance(attributes.get(n), dict)}
        self._seen |= {id(t): t for t in tables.values()}
        self._attributes(attributes, path)
        of_model = id(module) in self._of_model
        for name, table in tables.items():
            holds = Holds.HOOKS if name in HOOK_TABLES else Holds.ITEMS
            if of_model and name in ("_parameters", "_buffers"):
                holds = Holds.INPUTS
            label = f"{path}.{name}" if holds is Holds.HOOKS else path
            self.places.watch_data(table, holds, label)
            for key, value in table.items():
                (self._reach_hook if holds is Holds.HOOKS else self._reach)(value, f"{label}.{key}")
        self.objects.append((module, attributes))
        self._class(type(module), path)

    def _attributes(self, attributes: dict[str, Any], path: str, owner: str = "user") -> None:
        """Watch the attributes of an object; those count that some code names."""
        self.places.watch(attributes, Holds.ATTRIBUTES, path, owner)
        for name, value in list(attributes.items()):
            self._attribute(attributes, name, value, path)

    def _attribute(self, attributes: dict[str, Any], name: str, value: Any, path: str) -> None:
        """Reach an attribute of an object if it counts, or let it wait until code names it."""
        if self.names.counts(name):
            self._reach(value, f"{path}.{name}")
        elif not is_plain(value):
            self.names.wait(name, functools.partial(attributes.get, name), path)

    def _class(self, kind: type, path: str) -> None:
        """Watch the attributes of a class and its bases: methods may be replaced, and settings stand there."""
        for base in [*kind.__mro__, *type.mro(type(kind))]:
            foundation = is_foundation(base)
            layer = issubclass(base, torch.nn.Module | torch.optim.Optimizer | torch.autograd.Function)
            if foundation and not layer:
                continue
            attributes = object_parts.attributes_of_class(base)
            if not self.places.watch_class(attributes, base.__qualname__, "torch" if foundation else "class"):
                continue
            for name, value in list(attributes.items()):
                if foundation and object_parts.function_origin(value) != "user":
                    continue
                if issubclass(base, torch.autograd.Function) and name == "backward":
                    self._reach_hook(value, f"{base.__qualname__}.{name}")
                elif isinstance(value, types.FunctionType):
                    self._reach(value, f"{base.__qualname__}.{name}")
                else:
                    self._attribute(attributes, name, value, base.__qualname__)

    def _object(self, value: Any, path: str) -> None:
        kind = type(value)
        if isinstance(value, logging.Logger):
            self.places.probe(functools.partial(_LOGGED, value), f"the level of {path}")
        if kind.__module__.partition(".")[0] in _BESIDE and not kind.__module__.startswith(_WITHIN):
            return
        if isinstance(value, list | dict):
            if not object_parts.is_scope(value):  # the globals of a module count by name
                self.places.watch_data(value, Holds.ITEMS, path)
                self._all(value, path)
        elif isinstance(value, tuple | frozenset):
            self._all(value, path)
        elif object_parts.is_closed(kind):
            if is_one_way(value):
                self.problems.append(f"{path}, a {kind.__name__}, which gives another value at every use")
                self.require_comparable()  # at once, before the step takes anything from it
            state = closed_state(value)
            if state is not None:
                self.places.probe(state, path, closed_writer(value, state))
            if isinstance(value, set | collections.deque):
                self._all(value, path)
            elif isinstance(value, queue.SimpleQueue):
                self._all(gc.get_referents(value), path)
        if isinstance(value, threading.local):
            self.places.probe(lambda: tuple(value.__dict__.items()), path)
            self._all(dict(value.__dict__), path)
            return
        attributes = object_parts.own_attributes(value)
        if isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, path)
        elif attributes is not None and (attributes or not isinstance(value, _CONTAINERS)):
            owners = {"installed": "installed", "torch": "library"}
            self._attributes(attributes, path, owners.get(module_origin(kind.__module__), "user"))
        if kind.__flags__ & (1 << 9):
            self.objects.append((value, attributes))
            for part in kind.__mro__:
                for name in object_parts.slots(part):
                    self._slot(value, part, name, path)
            self._class(kind, path)

    def _all(self, value: Any, path: str) -> None:
        for key, item in dict.items(value) if isinstance(value, dict) else enumerate(value):
            self._reach(key, path)
            self._reach(item, f"{path}[{key!r:.40}]")

    def _slot(self, value: Any, kind: type, name: str, path: str) -> None:
        descriptor = vars(kind).get(name)
        if not isinstance(descriptor, types.MemberDescriptorType):
            return
        read = reader(descriptor.__get__, value)
        self.places.probe(read, f"{path}.{name}")
        self._reach(read(), f"{path}.{name}")

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        attributes = vars(optimizer)
        kept = {k: v for k, v in attributes.items() if k not in _OPTIMIZER_APART}
        self.places.watched.append(WatchedContainer(attributes, kept, Holds.ATTRIBUTES, path))
        for name, value in kept.items():
            if name in HOOK_TABLES:
                self.places.watch_data(value, Holds.HOOKS, f"{path}.{name}")
            else:
                self._attribute(attributes, name, value, path)
