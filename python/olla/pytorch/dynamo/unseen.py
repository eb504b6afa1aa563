"""State that a loss may read and Dynamo's guards do not see: a short list, each entry with a loop in tests/odd."""

from __future__ import annotations

import collections
import functools
import math
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from olla.pytorch.dynamo.graph import NotFollowed
from olla.pytorch.guards.containers import Holds, WatchedContainer
from olla.pytorch.guards.guard import Wholes
from olla.pytorch.guards.modes import ATTENTION_KERNELS
from olla.pytorch.guards.object_parts import attributes_of_class
from olla.pytorch.guards.values import same

_COMPARED = ("CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "ID_MATCH")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNBACKED = ("u", "zuf")  # how torch names numbers that are known only when a step runs
_Scope = Mapping[str, Any]


def attention_kernels() -> tuple[bool, ...]:
    """Return which kernels scaled_dot_product_attention may use."""
    return tuple([read() for read in _attention_readers()])


def has_function_modes() -> bool:
    """Whether a TorchFunctionMode is active other than that of a default device.

    Dynamo follows the methods of a mode by themselves where it does not follow what is called, and takes one function
    of torch's for another one there.
    """
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


@functools.cache
def _attention_readers() -> list[Callable[[], bool]]:
    backends = torch.backends.cuda
    return [getattr(backends, name) for name in ATTENTION_KERNELS if hasattr(backends, name)]


class Environment:
    """Tables that code may read by ways that Dynamo does not guard.

    These are the environment, the methods of tensors, functions in the classes of modules, and hooks of modules, which
    Dynamo can guard, in ten times as long.

    Args:
        model: whose modules these are.
        with_hooks: whether hooks are compared here.
    """

    def __init__(self, model: torch.nn.Module, with_hooks: bool = True) -> None:
        classes = {kind for module in model.modules() for kind in type(module).__mro__} - {object}
        tables = [attributes_of_class(kind) for kind in (torch.Tensor, *classes)]
        self._classes = set(map(id, tables))
        tables += [os.environ._data]  # type: ignore[attr-defined]
        if with_hooks:
            tables += [table for m in model.modules() for name, table in vars(m).items() if name.endswith(_HOOKS)]
        self._wholes = Wholes([WatchedContainer.of(table, Holds.ATTRIBUTES, "") for table in tables])

    def has_changed(self) -> bool:
        """Whether one of them is other than it was; numbers and other data of classes are Dynamo's.

        Complexity: O(tables).
        """
        at, found = -1, False
        while (at := self._wholes.first_changed(at + 1)) >= 0:
            watched = self._wholes.watched[at]
            for _, before, now in watched.changes():
                counts = id(watched.container) not in self._classes or _is_code(before) or _is_code(now)
                found |= counts and not same(before, now)
            watched.renew()
            self._wholes.renew(at)
        return found


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


class Probes:
    """Values that Dynamo takes for what they were though they are not: signs of zeros, orders of keys.

    To be made where Dynamo calls its backend.

    Args:
        scope: what ``L`` and ``G`` stand for in Dynamo's names of values.

    Raises:
        NotFollowed: a deque of bounded length is read, or a generator: Dynamo does not change them as Python does.
    """

    def __init__(self, scope: _Scope) -> None:
        context = TracingContext.try_get()
        guards = context.guards_context.dynamo_guards if context is not None else ()
        names = {guard.name for guard in guards if guard.create_fn_name() in _COMPARED}
        self._values: list[tuple[types.CodeType, Any]] = []
        for name in sorted(filter(None, names)):
            source = compile(name, "<guard>", "eval")
            value = _value(source, scope)
            if isinstance(value, collections.deque) and value.maxlen is not None:
                raise NotFollowed(f"{name} is a deque of bounded length, which Dynamo lets grow")
            if isinstance(value, types.GeneratorType):
                raise NotFollowed(f"{name} is a generator, which Dynamo does not take further")
            if (fact := _unseen(value)) is not None:
                self._values.append((source, fact))

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._values)

    def have_changed(self, scope: _Scope) -> bool:
        """Whether one of the values is another one that Dynamo takes for the same."""
        return any(_unseen(_value(source, scope)) not in (None, fact) for source, fact in self._values)


def require_known() -> None:
    """Raise a NotFollowed where Dynamo would not do all that Python does; called where Dynamo calls its backend."""
    context = TracingContext.try_get()
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if shapes is not None and any(str(symbol).startswith(_UNBACKED) for symbol in shapes.var_to_range):
        # Of a check of that, or a branch on it, Dynamo may leave nothing.
        raise NotFollowed("it reads the value of a tensor, or makes one whose shape depends on values")
    effects: Any = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks:
        raise NotFollowed("it registers a hook on a tensor that is there before it, and leaves it there")


def _value(source: types.CodeType, scope: _Scope) -> Any:
    try:
        return eval(source, dict(scope))
    except Exception:  # names that Dynamo alone knows
        return None


def _unseen(value: Any) -> Any:
    if isinstance(value, float) and value == 0:
        return math.copysign(1, value)
    return list(value) if isinstance(value, collections.OrderedDict) else None
