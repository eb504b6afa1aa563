"""A digest of everything reachable from some Python objects: data by value, functions by code and by what they name.

Data is followed completely. Code is followed by name: a function is read together with the globals, closure, defaults
and modules it names; of a class from an installed package, methods are read once some code that was read names them.
Source files are not looked at here; see olla.pytorch.fingerprint.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import enum
import functools
import hashlib
import logging
import os
import pathlib
import re
import types
import typing
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from olla.pytorch.origins import imported, is_foundation, module_origin, named, origin

_MAX_TENSOR_BYTES = 2**30
_EXACT = (bool, int, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), range)
# Their text says all about them.
_BY_TEXT = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
    pathlib.PurePath, np.dtype, np.generic, types.GenericAlias, types.UnionType, typing.TypeVar, logging.Logger,
    re.Pattern,
)  # fmt: skip
_BUILTIN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_METHODS = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_PLAIN_BASES = (collections.OrderedDict, collections.defaultdict, *_CONTAINERS, str, bytes, int, float, object)
_BARE: dict[type, Any] = {str: str.__str__, bytes: bytes.__bytes__, int: int.__int__, float: float.__float__}
# Entries of a class that say nothing about what it does.
_SKIPPED = {
    "__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__slots__", "__annotations__", "_abc_impl",
    "__abstractmethods__", "__orig_bases__", "__parameters__", "__firstlineno__", "__static_attributes__",
    "__annotate_func__", "__annotations_cache__", "__match_args__",
}  # fmt: skip
# Read elsewhere; what recurrent layers keep of their parameters.
_READ_APART = {"_parameters", "_buffers", "_flat_weights", "_flat_weight_refs"}
# Another one in each process: an id that torch leaves on functions; a hash() and a session of transformers.
_ACCIDENTAL = {"_torchdynamo_wrapper_id", "_original_object_hash", "SESSION_ID"}
# Torch calls these methods of classes that derive from its own, so no other code has to name them.
_CALLED_BY_TORCH = ("forward", "backward", "setup_context", "step")


class NotUnderstood(Exception):
    """An object whose influence on a capture is not known."""


class Walk:
    """Reads objects, and gives the digest of all that was read.

    Args:
        registered: id -> name of the tensors whose values no capture holds: parameters and buffers.

    Attributes:
        tensors: all others, in the order in which they were met: the same one in every process with the same digest.
    """

    def __init__(self, registered: dict[int, str]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._registered = registered
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # what has a number keeps its id
        self._queue: collections.deque[tuple[Any, str, bool]] = collections.deque()
        self._names = dict.fromkeys(_CALLED_BY_TORCH)
        self._waiting: dict[str, list[tuple[str, Any]]] = {}  # methods nobody has named so far
        self._seen_attributes: set[tuple[str, str]] = set()

    def add(self, label: str, value: Any) -> None:
        """Read an object and what it leads to.

        Raises:
            NotUnderstood: names what, and the way there.
        """
        self._emit(label, self._token(value, label, False))
        while self._queue:
            self._visit(*self._queue.popleft())

    @property
    def digest(self) -> str:
        """Of all that was read."""
        return self._hash.hexdigest()

    def _emit(self, *parts: str) -> None:
        self._hash.update(repr(parts).encode())

    def _token(self, value: Any, path: str, lenient: bool) -> str:
        """Return a short text for a value; an object gets a number, and is read later."""
        kind = type(value)
        if kind in _EXACT:
            return f"{kind.__name__}:{value!r}"
        if kind is float:
            return f"float:{value.hex()}"
        if kind in (tuple, torch.Size):
            return f"({','.join(self._token(item, path, lenient) for item in value)})"
        if kind in (set, frozenset):
            return self._set(value, path, lenient)
        if isinstance(value, _BY_TEXT):
            return f"{kind.__qualname__}:{value}"
        if isinstance(value, enum.Enum):
            return f"enum:{self._token(kind, path, lenient)}.{value.name}"
        if isinstance(value, types.ModuleType):
            return f"module:{value.__name__}"
        if isinstance(value, type) and is_foundation(value):
            return f"class:{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.MethodType):
            both = (value.__func__, value.__self__)
            return f"method:{','.join(self._token(item, path, lenient) for item in both)}"
        if isinstance(value, _BUILTIN):
            return self._builtin(value, path, lenient)
        if kind.__module__ == "typing":
            return f"typing:{value}"
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._alive)
            self._alive.append(value)
            self._queue.append((value, path, lenient))
        return f"#{number}"

    def _set(self, items: Iterable[Any], path: str, lenient: bool) -> str:
        """Return a text that does not depend on the order of a set, nor on the order in which its elements are read."""
        named_items = sorted(((self._name(item, path, lenient), item) for item in items), key=lambda pair: pair[0])
        for _, item in named_items:
            if isinstance(item, type | types.FunctionType):
                self._token(item, path, True)
        return f"{{{','.join(name for name, _ in named_items)}}}"

    def _name(self, value: Any, path: str, lenient: bool) -> str:
        if isinstance(value, type | types.FunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if type(value) in (tuple, frozenset):
            return f"({','.join(sorted(self._name(item, path, lenient) for item in value))})"
        if type(value) in _EXACT or type(value) is float or isinstance(value, _BY_TEXT):
            return self._token(value, path, lenient)
        if isinstance(value, enum.Enum):
            return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
        return self._unknown(value, path, lenient)

    def _builtin(self, value: Any, path: str, lenient: bool) -> str:
        owner = getattr(value, "__self__", None)
        of = "" if owner is None or isinstance(owner, types.ModuleType) else self._token(owner, path, lenient)
        where = getattr(value, "__objclass__", None)
        return f"builtin:{value.__qualname__}:{of}:{where.__qualname__ if where else getattr(value, '__module__', '')}"

    def _unknown(self, value: Any, path: str, lenient: bool) -> str:
        if lenient:
            return f"opaque:{type(value).__module__}.{type(value).__qualname__}"
        raise NotUnderstood(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")

    def _visit(self, value: Any, path: str, lenient: bool) -> None:
        number = f"#{self._numbers[id(value)]}"
        if isinstance(value, torch.Tensor):
            self._emit(number, self._tensor(value, path, lenient))
        elif isinstance(value, torch.nn.Module):
            self._module(number, value, path, lenient)
        elif isinstance(value, types.FunctionType):
            self._function(number, value, path, lenient)
        elif isinstance(value, type):
            self._class(number, value, path, lenient)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            content = hashlib.sha256(value.tobytes()).hexdigest()
            self._emit(number, "array", str(value.dtype), str(value.shape), content)
        elif parts := _parts(value):
            self._emit(number, type(value).__qualname__, *(self._token(p, path, lenient) for p in parts))
        elif isinstance(value, contextvars.ContextVar):
            self._emit(number, "variable", value.name, self._token(value.get(None), path, lenient))
        else:
            self._object(number, value, path, lenient)

    def _tensor(self, tensor: torch.Tensor, path: str, lenient: bool) -> str:
        if id(tensor) in self._registered:
            raise NotUnderstood(f"{path} is {self._registered[id(tensor)]}, reached on a second way")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._unknown(tensor, path, lenient)
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > _MAX_TENSOR_BYTES:
            raise NotUnderstood(f"{path} is a constant of {num_bytes} bytes")
        self.tensors.append(tensor)
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{describe(tensor)} {hashlib.sha256(data.data).hexdigest()}"

    def _module(self, number: str, module: torch.nn.Module, path: str, lenient: bool) -> None:
        self._emit(number, "module", self._token(type(module), path, lenient))
        for table in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[table].items():
                known = "" if tensor is None else self._registered.get(id(tensor))
                # a parameter of a model beside the captured one is a constant
                text = self._token(tensor, f"{path}.{name}", lenient) if known is None else known
                self._emit(table, name, text, "" if tensor is None else describe(tensor))
        for name, value in vars(module).items():
            if name in _READ_APART:
                continue
            if name == "_modules":
                for child, other in value.items():
                    self._emit(child, self._token(other, f"{path}.{child}", lenient))
            else:
                if "_hooks" in name and isinstance(value, dict):
                    value = _numbered(vars(module), name)
                self._emit(name, self._token(value, f"{path}.{name}", lenient))

    def _function(self, number: str, function: types.FunctionType, path: str, lenient: bool) -> None:
        code = function.__code__
        where = origin(code.co_filename)
        path = f"{path} ({function.__qualname__})" if path.count("(") < 3 else path
        self._emit(number, "function", *(self._token(t, path, lenient) for t in _code(code)))
        closure = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                closure.append((name, cell.cell_contents))
            except ValueError:
                closure.append((name, None))  # empty
        parts = [("default", function.__defaults__), *(function.__kwdefaults__ or {}).items(), *closure]
        for name, value in [*parts, *vars(function).items()]:
            if name in _ACCIDENTAL:
                continue
            self._emit(name, self._token(value, f"{path} {name}", lenient))
        if where not in ("torch", "stdlib"):
            self._globals(code, function.__globals__, path, lenient or where == "installed")

    def _globals(self, code: types.CodeType, scope: dict[str, Any], path: str, lenient: bool) -> None:
        names, texts = named(code)
        for name in (*names, *texts):
            if name not in self._names:
                self._names[name] = None
                for label, method in self._waiting.pop(name, ()):
                    self._emit(label, self._token(method, label, True))
        modules: dict[int, types.ModuleType] = {}
        for name in names:
            if name in scope and name not in _ACCIDENTAL:
                self._emit(name, self._token(scope[name], f"{path} {name}", lenient))
                if isinstance(scope[name], types.ModuleType):
                    modules[id(scope[name])] = scope[name]
            elif isinstance(getattr(builtins, name, None), types.FunctionType):
                self._emit(name, self._token(getattr(builtins, name), f"{path} {name}", lenient))
        modules.update((id(m), m) for m in imported(code, scope))
        self._attributes(list(modules.values()), names, lenient)
        if "environ" in names or "getenv" in names:
            known = [*texts, *(v for n in names if isinstance(v := scope.get(n), str))]
            self._emit(*(f"{name}={os.environ[name]}" for name in known if name in os.environ))

    def _attributes(self, modules: list[types.ModuleType], names: Iterable[str], lenient: bool) -> None:
        """Read what code may take from the modules it names."""
        while modules:
            module = modules.pop()
            where = module_origin(module.__name__)
            for name in names if where != "stdlib" else ():
                key = (module.__name__, name)
                if key in self._seen_attributes or name not in vars(module):
                    continue
                self._seen_attributes.add(key)
                value = vars(module)[name]
                if isinstance(value, types.ModuleType):
                    modules.append(value)
                elif where != "torch" or (
                    isinstance(value, types.FunctionType) and origin(value.__code__.co_filename) == "user"
                ):
                    path = f"{module.__name__}.{name}"
                    self._emit(path, self._token(value, path, lenient or where == "installed"))

    def _class(self, number: str, kind: type, path: str, lenient: bool) -> None:
        where = module_origin(kind.__module__)
        parents = (type(kind), *kind.__bases__)
        self._emit(number, "class", kind.__module__, kind.__qualname__)
        self._emit(*(self._token(parent, path, lenient) for parent in parents))
        foundation = [base for base in kind.__mro__[1:] if is_foundation(base)]
        for name, value in vars(kind).items():
            if name in _SKIPPED:
                continue
            label = f"{kind.__qualname__}.{name}"
            if where == "user" or name.startswith("__") or name in self._names or not isinstance(value, _METHODS):
                self._emit(label, self._token(value, label, lenient or where != "user"))
            elif any(name in vars(base) for base in foundation):
                self._emit(label, self._token(value, label, True))
            else:
                self._waiting.setdefault(name, []).append((label, value))

    def _object(self, number: str, value: Any, path: str, lenient: bool) -> None:
        kind = type(value)
        slots = [s for base in kind.__mro__ for s in _slots(base)]
        plain = next(base for base in _PLAIN_BASES if issubclass(kind, base))
        own_bytes = 8 * (len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))
        if kind.__basicsize__ > plain.__basicsize__ + own_bytes:  # it holds something that Python code cannot reach
            self._emit(number, self._unknown(value, path, lenient))
            return
        self._emit(number, "object", self._token(kind, path, lenient))
        if isinstance(value, dict):
            items = list(dict.items(value))
        elif isinstance(value, list | tuple | collections.deque):
            items = list(enumerate(value))
        elif isinstance(value, set | frozenset):
            items = [("items", frozenset(value))]
        else:
            items = [("value", _BARE[plain](value))] if plain in _BARE else []
        if isinstance(value, collections.defaultdict):
            items.append(("default", value.default_factory))
        items += [(s, getattr(value, s)) for s in slots if hasattr(value, s)]
        items += [(n, v) for n, v in getattr(value, "__dict__", {}).items() if n not in _ACCIDENTAL]
        for key, item in items:
            label = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key!s:.40}"
            self._emit(self._token(key, path, lenient), self._token(item, label, lenient))


def describe(tensor: torch.Tensor) -> str:
    """Return what a capture holds of a tensor whose values it does not hold."""
    return " ".join(
        str(fact)
        for fact in (
            type(tensor).__name__,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_leaf,
        )
    )


def _numbered(attributes: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Return a table of hooks with their ranks in place of their keys, which torch counts through the process."""
    hooks = attributes.get(name.partition("_hooks")[0] + "_hooks", {})
    rank = {key: i for i, key in enumerate(hooks)}
    return tuple((rank.get(key, key), value) for key, value in attributes[name].items())


def _code(code: types.CodeType) -> list[Any]:
    """Return what a code object does, without where it stands; nested ones are written out."""
    facts: list[Any] = []
    waiting: list[Any] = [code]
    while waiting:
        part = waiting.pop()
        facts += [part.co_name, part.co_code, part.co_names, part.co_varnames, part.co_freevars, part.co_cellvars]
        facts += [part.co_argcount, part.co_kwonlyargcount, part.co_posonlyargcount, part.co_flags]
        facts.append(getattr(part, "co_exceptiontable", b""))
        for constant in part.co_consts:
            if isinstance(constant, types.CodeType):
                facts.append("code")
                waiting.append(constant)
            else:
                facts.append(constant)
    return facts


def _parts(value: Any) -> tuple[Any, ...]:
    """Return what makes up a descriptor, a partial function or a reference; empty for everything else."""
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, functools.partial | functools.partialmethod):
        return (value.func, value.args, *value.keywords.items())
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, types.MappingProxyType):
        return tuple(value.items())
    if type(value) is weakref.ref:
        return (value(), None)
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    return ()


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))
