"""Attributes, slots and items of objects, for guards; and which types keep state that Python cannot read."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from olla.pytorch.guards.code import module_origin, origin

_VIEWS: Any = type({}.keys()) | type({}.values()) | type({}.items())
_PARTS: tuple[tuple[Any, tuple[str, ...]], ...] = (  # attributes that make up an object
    (types.MethodType, ("__self__", "__func__")),
    (property, ("fget", "fset", "fdel")),
    (staticmethod | classmethod, ("__func__",)),
    (functools.cached_property, ("func",)),
    (functools.partial | functools.partialmethod, ("func", "args", "keywords")),
    (functools._lru_cache_wrapper, ("__wrapped__",)),
    (slice, ("start", "stop", "step")),
)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """Compute with real tensors in the middle of a trace."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def values_of(tensor: torch.Tensor) -> Any:
    with no_modes():
        return tensor.detach().tolist()


def code_origin(code: types.CodeType, scope: dict[str, Any]) -> str:
    """Return the origin of code that runs; where it was generated, that of the module it was generated for."""
    if code.co_filename != "<string>":
        return origin(code.co_filename)
    name = str(scope.get("__name__", ""))
    return "stdlib" if name.startswith("namedtuple_") else module_origin(name)


def is_scope(value: Any) -> bool:
    """Whether a dict holds the globals of a module."""
    if not isinstance(value, dict) or "__builtins__" not in value:
        return False
    module = sys.modules.get(str(value.get("__name__")))
    return module is not None and vars(module) is value


def is_closed(kind: type) -> bool:
    """Whether objects of a class hold something that Python code does not see."""
    num_slots = sum(len(slots(base)) for base in kind.__mro__)
    plain = 8 * (num_slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))
    return kind.__basicsize__ > object.__basicsize__ + plain


def slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def hooks_of(tensor: torch.Tensor) -> list[tuple[int, Any]]:
    """Return the hooks on a tensor and on its gradient, each with its key."""
    tables: tuple[Any, ...] = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [item for table in tables for item in (table or {}).items()]


def attributes_of_class(kind: type) -> dict[str, Any]:
    """Return the dict of a class, which stands behind its proxy."""
    return next(d for d in gc.get_referents(vars(kind)) if isinstance(d, dict))


def function_origin(value: Any) -> str:
    """Return where a function of Python was written; empty for anything else."""
    return origin(value.__code__.co_filename) if isinstance(value, types.FunctionType) else ""


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object, whatever its class does to attributes."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def parts_of(value: Any) -> tuple[Any, ...]:
    """Return what makes up a method, a descriptor, a partial function, a getter or a reference; else nothing."""
    for kind, names in _PARTS:
        if isinstance(value, kind):
            return tuple(getattr(value, name) for name in names)
    if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType | type(None)):
        return (value.__self__,)
    if isinstance(value, operator.attrgetter | operator.methodcaller):
        return tuple(value.__reduce__())  # names of attributes are among the arguments
    if isinstance(value, types.MappingProxyType | _VIEWS):
        return tuple(d for d in gc.get_referents(value) if isinstance(d, dict))
    return (value(), None) if isinstance(value, weakref.ref) else ()
