"""Python state that a step reads while it is captured, each place as it was before the step could read it.

Code is watched as it is entered: a function is walked through when it is called for the first time, before it runs. Its
globals, closure and defaults are reached by name; of an object, the attributes count that some code entered names. Data
(lists, dicts, sets, arrays) counts as a whole. Torch's own state is compared apart, see olla.pytorch.guards.modes.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from olla.errors import SPENT, CaptureError
from olla.pytorch.guards import clocks
from olla.pytorch.guards.attribute_names import FirstUse
from olla.pytorch.guards.code import module_origin, named, origin
from olla.pytorch.guards.containers import Holds
from olla.pytorch.guards.generators import SETTERS
from olla.pytorch.guards.object_parts import attributes_of_class, code_origin, function_origin, hooks_of, values_of
from olla.pytorch.guards.objects import Objects
from olla.pytorch.guards.values import MISSING, is_plain

_WATCHED = ("user", "installed")  # origins of code whose reads are guarded
_ENVIRONMENT = id(os._Environ.__getitem__.__code__)
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")  # close over what another function holds


class Reads(Objects):
    """The Python state that a step reads.

    Args:
        model, inputs: see `Objects`.
        roots: path -> what the step begins with: the model, its loss function, its optimizer.
    """

    def __init__(self, model: torch.nn.Module, roots: dict[str, Any], inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(model, inputs)
        self._clocks: dict[int, frozenset[int]] = {}  # by the id of their code
        self._first_use = FirstUse()
        self._scopes: list[dict[str, Any]] = []  # of code that looks globals up by name
        self._closing: list[types.CodeType] = []  # code that was entered and reads variables of functions around it
        for name, table in _global_hooks():
            self.places.watch(table, Holds.HOOKS, name, "torch")
            for function in table.values():
                self._reach_hook(function, name)
        for path, value in roots.items():
            self._reach(value, path)
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, FakeTensor):
                self._attributes(vars(tensor), "a parameter or buffer")
        for _, function in itertools.chain.from_iterable(map(hooks_of, self._inputs.values())):
            self._reach_hook(function, "a hook of a tensor")
        self._drain()

    @contextlib.contextmanager
    def recording(self, is_here: Callable[[], bool]) -> Iterator[None]:
        """Watch which code this thread enters; ``is_here``: whether the caller is captured."""
        before = sys.gettrace()

        def entered(frame: types.FrameType, event: Any, argument: Any) -> Any:
            code = id(frame.f_code)
            if code not in self._entered:
                self._enter(frame.f_code, frame.f_globals, frame)
            if code == _ENVIRONMENT:
                self._read_environment(frame)
            if code in self._clocks:
                frame.f_trace_opcodes = True
                return self._see_clocks
            return before(frame, event, argument) if before is not None else None

        self.generators.begin()
        with self._first_use.watching(is_here):
            sys.settrace(entered)
            try:
                yield
            finally:
                sys.settrace(before)
                self._finish()

    def names_are_read(self, names: Iterable[str]) -> None:
        """Note that code which nobody watches reads attributes of these names."""
        self._learn(names)
        self._drain()

    def value_of(self, tensor: torch.Tensor) -> None:
        """Note that the step reads the values of a tensor that is no input."""
        if tensor.numel() <= 2**16:
            self.places.probe(functools.partial(values_of, tensor), "the values of a tensor that the step reads")
        else:
            self.problems.append("the values of a large tensor that is no input")

    def check(self, is_constant: Callable[[Any], bool]) -> None:
        """Raise a CaptureError for what can be neither compared nor repeated; to be called where the step ends.

        ``is_constant``: whether a value that the step made is the same in every step.
        """
        self.require_comparable()  # code of the user's may have caught the error that said so before
        self.generators.check()
        self.places.check(self._first_use, is_constant)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what the step does to lists, dicts, objects and variables inside this context."""
        try:
            yield
        finally:
            self.places.undo()
            self.generators.restore()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Add to a CaptureError what the capture has used up, so that no ordinary step runs in its place."""
        try:
            yield
        except CaptureError as error:
            if not self.places.lost:
                raise
            raise CaptureError(
                f"{error} The ordinary step does not run in its place: {self.places.lost}, by the capture, and cannot "
                "be put back.",
                rule=SPENT,
            ) from error

    def forget(self) -> None:
        """Let go of what only the capture itself needed."""
        self.names.forget()
        self.places.forget()
        for table in (self._seen, self._inputs, self._functions, self._clocks):
            table.clear()

    # Code ------------------------------------------------------------------------------------------------------------

    def _enter(self, code: types.CodeType, scope: dict[str, Any], frame: types.FrameType | None) -> None:
        """Walk through a function before it runs for the first time."""
        self._entered[id(code)] = code
        where = code_origin(code, scope)
        if where == "olla":
            return
        names = named(code)
        if where in _WATCHED:
            if code.co_freevars and code.co_name not in _COMPREHENSIONS:
                self._closing.append(code)
            self.names.is_open |= names.is_open and where == "user"
            for name in names.variables:
                self._variable(name, scope, names.loaded)
            for name in names.modules:
                self._imported(name, scope, names.loaded)
            if "globals" in names.variables:
                self._scopes.append(scope)
            if where == "user" and (found := clocks.offsets(code, scope)):
                self._clocks[id(code)] = found
            if names.loaded & SETTERS:
                self.generators.watch()
        for function, path in self._functions.get(id(code), ()):
            self._closure(function, path)
        self._learn(names.loaded)
        if (file := clocks.FILES.get(code)) and self._caller(frame) == "user":
            self.problems.append(file)
        self._drain()

    def _drain(self) -> None:
        super()._drain()
        while self._elsewhere:  # autograd of a GPU runs these on threads of its own, where nobody watches
            function = self._elsewhere.pop()
            if id(function.__code__) not in self._entered:
                self._enter(function.__code__, function.__globals__, None)

    def _caller(self, frame: types.FrameType | None) -> str:
        """Return the origin of the code that led to a frame of Python's own library."""
        while frame is not None and (where := origin(frame.f_code.co_filename)) == "stdlib":
            frame = frame.f_back
        return "" if frame is None else where

    def _finish(self) -> None:
        """Watch globals that code may look up by computed names, and functions of torch that it names."""
        for scope in self._scopes:
            for name in self.names.known & scope.keys():
                self.places.watch_key(scope, name, str(scope.get("__name__")))
        functions = ((vars(torch), "torch"), (vars(torch.nn.functional), "torch.nn.functional"))
        for scope, place in (*functions, (attributes_of_class(torch.Tensor), "Tensor")):
            for name in self.names.known & scope.keys():
                if function_origin(scope[name]) != "olla":
                    self.places.watch_key(scope, name, place)
        self._find_closures()

    def _variable(self, name: str, scope: dict[str, Any], attributes: frozenset[str]) -> None:
        """Watch a global, and what is read from it where it is a module."""
        place = str(scope.get("__name__", "?"))
        value = scope.get(name, MISSING)
        if function_origin(value) == "olla":
            return
        self.places.watch_key(scope, name, place)
        if value is MISSING:
            self.places.watch_key(vars(builtins), name, "builtins")
            value = vars(builtins).get(name, MISSING)
        if isinstance(value, types.ModuleType):
            self._module(value, attributes)
        elif not clocks.is_clock(value):  # reported where code loads it
            self._reach(value, f"{place}.{name}")

    def _module(self, module: types.ModuleType, attributes: frozenset[str]) -> None:
        """Watch what code may read from modules that it names."""
        waiting, seen = [module], {id(module)}
        while waiting:
            part = waiting.pop()
            own = module_origin(part.__name__) in _WATCHED
            if module_origin(part.__name__) == "user":
                self._reach(part, part.__name__)
            for name in attributes & vars(part).keys() if part is not os else ():
                value = vars(part)[name]
                if function_origin(value) == "olla":
                    continue  # stands in for torch's while a step is traced
                self.places.watch_key(vars(part), name, part.__name__)
                if isinstance(value, types.ModuleType):
                    if id(value) not in seen:
                        seen.add(id(value))
                        waiting.append(value)
                elif own or is_plain(value) or isinstance(value, list | dict | types.FunctionType):
                    self._reach(value, f"{part.__name__}.{name}")

    def _imported(self, name: str, scope: dict[str, Any], attributes: frozenset[str]) -> None:
        package = str(scope.get("__package__") or "")
        while True:
            module = sys.modules.get(f"{package}.{name}" if package else name)
            if isinstance(module, types.ModuleType):
                self._module(module, attributes)
            if not package:
                return
            package = package.rpartition(".")[0]

    def _read_environment(self, frame: types.FrameType) -> None:
        if self._caller(frame) in _WATCHED:
            key = frame.f_locals.get("key")
            if isinstance(key, str):
                self.places.probe(functools.partial(os.environ.get, key), f"the environment variable {key}")

    def _see_clocks(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in self._clocks[id(frame.f_code)]:
            self.problems.append(f"{clocks.WHAT} ({frame.f_code.co_filename}:{frame.f_lineno})")
        return self._see_clocks

    def _find_closures(self) -> None:
        """Find functions that ran and were not reached as objects: their closures count, too."""
        codes = [code for code in self._closing if id(code) not in self._functions]
        for function in gc.get_referrers(*codes) if codes else ():
            is_function = isinstance(function, types.FunctionType)
            if is_function and code_origin(function.__code__, function.__globals__) in _WATCHED:
                self._closure(function, function.__qualname__)
        self._drain()


def _global_hooks() -> list[tuple[str, dict[int, Any]]]:
    """Return torch's tables of hooks for all modules and optimizers."""
    spaces = (torch.nn.modules.module, torch_optimizer)
    found = [(name, table) for space in spaces for name, table in vars(space).items() if name.startswith("_global_")]
    return [(name, table) for name, table in found if isinstance(table, dict) and name.endswith("hooks")]
