"""Calls of a wrapped model or function: planned, unplanned, or traced anew since unguarded state has changed."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from olla.aten.backend import SETTINGS, Backend
from olla.aten.partition import AtenPartitioner
from olla.aten.record import WrapReport
from olla.inductor.compat import dynamo
from olla.pytorch.capture.exclusive import Silence
from olla.pytorch.dynamo.follow import begin, say_eager
from olla.pytorch.dynamo.unseen import Environment, attention_kernels, has_function_modes


class Calls:
    """Stands in place of a module's call, or of a function.

    Args:
        given: the module or the function.
        partition: divides forward and backward; its graphs are those of the report.
        report: takes graphs, graph breaks and counts of calls.
        dynamic: as of ``torch.compile``.
    """

    def __init__(
        self, given: Callable[..., Any], partition: AtenPartitioner, report: WrapReport, dynamic: bool | None
    ) -> None:
        begin()
        model: Any = given if isinstance(given, torch.nn.Module) else None
        self._model = model
        self._plain = given if model is None else model._call_impl
        self._entry = given if model is None else _entry(model)
        self._partition = partition
        self._report = report
        self._dynamic = dynamic
        self._change_settings = dynamo.settings(SETTINGS)
        self._environments: WeakKeyDictionary[torch.nn.Module, Environment] = WeakKeyDictionary()
        self._lazy: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()  # some parameters have no shape yet
        self._silence = Silence()
        # Compiled functions by the enabled attention kernels; each has a backend, by which Dynamo tells graphs apart.
        self._followed: dict[tuple[bool, ...], tuple[Backend, Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it.

        Complexity: beside Dynamo's guards O(values passed + classes of the modules passed).
        """
        modules = [self._model] if self._model is not None else _modules(self._plain, (*args, *kwargs.values()))
        if (
            dynamo.has_global_hooks()
            or has_function_modes()
            or any(map(self._is_lazy, modules))
            or _has_scalars((args, kwargs))
        ):
            result, is_planned = self._plain(*args, **kwargs), False
        else:
            if self._has_changed(modules, args, kwargs):
                self._followed.clear()
                self._environments.clear()
            result, is_planned = self._called(modules, args, kwargs)
        self._report.num_calls += 1
        self._report.num_unplanned_calls += not is_planned
        return result

    def _called(self, modules: Iterable[Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Return the result of a call, and whether a planned graph has run in it."""
        backend, compiled = self._planned()
        self._partition.saved_before = 0
        backend.call = self._report.num_calls
        num_runs, num_graphs, reasons = backend.num_runs, backend.num_graphs, dynamo.reasons()
        change_back = self._change_settings()
        say_eager(1)
        try:
            with backend.suppressed, self._silence:
                result = compiled(*args, **kwargs)
        finally:
            say_eager(-1)
            change_back()
            if backend.num_graphs > num_graphs:  # while it compiles, Dynamo changes classes of torch's
                self._environments.clear()
            for module in modules:
                if module not in self._environments:
                    self._environments[module] = Environment(module, with_hooks=False)
        if backend.num_runs == num_runs:
            for reason, number in dynamo.reasons().items():
                if number > reasons.get(reason, 0):
                    backend.note_line(dynamo.in_one_line(reason))
        return result, backend.num_runs > num_runs

    def _planned(self) -> tuple[Backend, Callable[..., Any]]:
        attention = attention_kernels()
        if attention not in self._followed:
            backend = Backend(self._partition, self._report)
            self._followed[attention] = (
                backend,
                torch.compile(self._entry, backend=backend, dynamic=self._dynamic),
            )
        return self._followed[attention]

    def _has_changed(self, modules: Iterable[Any], args: Any, kwargs: Any) -> bool:
        """Whether state that Dynamo has no guards for has changed."""
        for module in modules:
            if module in self._environments and self._environments[module].has_changed():
                return True
        function = self._plain if self._model is None else self._model.forward
        code: Any = getattr(function, "__code__", None)
        probes = [p for backend, _ in self._followed.values() for p in backend.probes.get(code, ())]
        if not probes:
            return False
        scope = {"L": _locals(function, args, kwargs), "G": function.__globals__}
        return any(p.have_changed(scope) for p in probes)

    def _is_lazy(self, module: Any) -> bool:
        if self._lazy.get(module, True):
            self._lazy[module] = any(is_lazy(p) for p in module.parameters())
        return self._lazy[module]


def _entry(model: Any) -> Any:
    """Return the function to trace: the model's own call, or a frame around it if forward is that of a torch class.

    Dynamo leaves the frames of torch's own modules alone.
    """
    if not dynamo.skips(model.forward):
        return model._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # Code of its own, since Dynamo counts compilations by code.
    return types.FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)


def _modules(function: Any, values: Iterable[Any]) -> list[torch.nn.Module]:
    """Return the modules among the values passed to a function, and among those of its closure and its object."""
    places = (*values, getattr(function, "__self__", None), *_cells(function).values())
    return [value for value in places if isinstance(value, torch.nn.Module)]


def _cells(function: Any) -> dict[str, Any]:
    """Return the variables of a function's closure that have values."""
    code = getattr(function, "__code__", None)
    found = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True) if code is not None else ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            found[name] = cell.cell_contents
    return found


def _has_scalars(values: Any) -> bool:
    """Whether numbers of numpy's are among values: Dynamo makes arrays of them, which round in another way."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, np.generic):
            return True
        if type(value) is dict:
            waiting += value.values()
        elif type(value) in (tuple, list):
            waiting += value
    return False


def _locals(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the local variables with which a call of a function begins, those of its closure among them."""
    own = getattr(function, "__self__", None)
    signature = inspect.signature(getattr(function, "__func__", function))
    bound = signature.bind(*([] if own is None else [own]), *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments | _cells(function)
