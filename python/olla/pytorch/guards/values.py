"""Python values that a capture holds: which are compared by value, and how the state of a closed object is read."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import fractions
import functools
import mmap
import operator
import pathlib
import pickle
import queue
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MISSING = object()  # stands for an entry that is not there
_PLAIN = (bool, int, float, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range)
_BY_VALUE = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, np.generic, pathlib.PurePath,
    re.Pattern, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, complex,
)  # fmt: skip
_LOCKS = tuple(type(make()) for make in (threading.Lock, threading.RLock))
# What holds no value that a step could compute with.
_BESIDE = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType,
    types.FrameType, types.GenericAlias, types.UnionType, torch.Generator, torch.Stream, torch.Event, *_LOCKS,
)  # fmt: skip
_ITEMS: tuple[Any, ...] = ([], (), "", b"", bytearray(), range(0), range(1 << 64), reversed([]))
_ITERATORS = tuple(type(iter(items)) for items in _ITEMS)  # whose place can be set
_C_DATA = ctypes.Structure.__mro__[1]  # of all objects of ctypes
_MAX_ARRAY_BYTES = 2**26


def is_plain(value: Any) -> bool:
    """Whether a value cannot change, and is compared with another one by type and value."""
    return type(value) in _PLAIN or (isinstance(value, _BY_VALUE) and not getattr(value, "__dict__", None))


def same(old: Any, new: Any) -> bool:
    """Whether a step that read one value would compute the same with the other one, now and later.

    Equal numbers of two types are not the same, nor are 0.0 and -0.0; nan is the same as nan. Things that may change
    later, such as lists, are the same if they are one object.

    Example:
        >>> same(1, 1), same(1, True), same(0.0, -0.0), same(float("nan"), float("nan"))
        (True, False, False, True)
    """
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, float | complex | np.generic):
        return repr(old) == repr(new)
    if isinstance(old, tuple):
        return len(old) == len(new) and all(same(a, b) for a, b in zip(old, new, strict=True))
    if type(old) is frozenset:
        return bool(old == new)
    if type(old) is functools.partial:
        return same(*((p.func, p.args, *p.keywords.items()) for p in (old, new)))
    if isinstance(old, types.FunctionType):
        return _same_function(old, new)
    if dataclasses.is_dataclass(old) and getattr(type(old), "__dataclass_params__").frozen:  # noqa: B009
        names = [f.name for f in dataclasses.fields(old)]
        return all(same(getattr(old, n, MISSING), getattr(new, n, MISSING)) for n in names)
    return is_plain(old) and bool(old == new)


def _same_function(old: types.FunctionType, new: types.FunctionType) -> bool:
    """Whether two functions without closures have the same code, globals and defaults."""
    if old.__closure__ or new.__closure__ or old.__kwdefaults__ or new.__kwdefaults__ or old.__code__ != new.__code__:
        return False
    constants = same(old.__code__.co_consts, new.__code__.co_consts)
    return constants and old.__globals__ is new.__globals__ and same(old.__defaults__, new.__defaults__)


def equal(old: Any, new: Any) -> bool:
    """Whether two values that were read from a place are the same; tuples and lists are compared by their items."""
    if type(old) is type(new) and type(old) in (tuple, list):
        return len(old) == len(new) and all(equal(a, b) for a, b in zip(old, new, strict=True))
    return same(old, new)


def is_one_way(value: Any) -> bool:
    """Whether an object gives another value at every use and cannot be given its state back, as a generator."""
    return hasattr(type(value), "__next__") and not isinstance(value, _ITERATORS) and not hasattr(type(value), "seek")


def closed_state(value: Any) -> Callable[[], Any] | None:
    """Return a function that reads the state of an object whose inside Python code cannot see; None: it has none.

    Raises:
        ValueError: its state cannot be read, and it is likely to change; says what it is.
    """
    if isinstance(value, _BESIDE):
        return None
    for kind, state_of in _STATES:
        if isinstance(value, kind):
            return state_of(value)
    if hasattr(type(value), "readable") and hasattr(type(value), "tell"):
        return _file_state(value)

    def pickled() -> Any:
        with warnings.catch_warnings(action="ignore"):
            return pickle.dumps(value, 5)

    try:
        pickled()
    except Exception:
        return None
    return pickled


def closed_writer(value: Any, read: Callable[[], Any]) -> Callable[[Any], None]:
    """Return a function that gives an object the state that ``read`` returned, as far as it can be given one."""

    def write(state: Any) -> None:
        with contextlib.suppress(Exception):  # whatever the object does: it is compared again
            if equal(state, read()):
                return
            if isinstance(value, set):
                value.clear()
                value.update(state)
            elif isinstance(value, collections.deque):
                value.clear()
                value.extend(state)
            elif isinstance(value, np.ndarray):
                value[...] = np.frombuffer(state[2], value.dtype).reshape(value.shape)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = pickle.loads(state).bit_generator.state
            elif isinstance(state, int) and hasattr(value, "seek"):
                value.seek(state)
            elif isinstance(state, bytes):
                value.__setstate__(pickle.loads(state).__reduce_ex__(4)[2])

    return write


def _array_state(array: np.ndarray[Any, Any]) -> Callable[[], Any]:
    _require_small("an array of numpy", array.nbytes, array.dtype.hasobject)
    return lambda: (str(array.dtype), array.shape, array.tobytes())


def _buffer_state(value: Any) -> Callable[[], Any]:
    _require_small(f"a {type(value).__name__}", memoryview(value).nbytes)
    if isinstance(value, ctypes._Pointer):
        return lambda: (bytes(value), bytes(value.contents) if value else None)
    return lambda: bytes(value)


def _require_small(what: str, num_bytes: int, holds_objects: bool = False) -> None:
    if num_bytes > _MAX_ARRAY_BYTES or holds_objects:
        raise ValueError(f"{what} of {num_bytes} bytes, too much to compare at every call")


def _generator_state(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    return frame and (frame.f_lasti, tuple((k, v) for k, v in frame.f_locals.items() if is_plain(v)))


def _file_state(file: Any) -> Callable[[], Any] | None:
    try:
        if not file.readable() or not file.seekable():
            return None
    except ValueError:  # closed
        return None

    def place() -> int | None:
        try:
            return None if file.closed else file.tell()
        except OSError:  # not known for a text file that next() reads
            return -1

    return place


# Kind of a closed object -> what makes the function that reads its state.
_STATES: tuple[tuple[Any, Callable[[Any], Callable[[], Any]]], ...] = (
    (np.ndarray, _array_state),
    (memoryview | mmap.mmap | _C_DATA, _buffer_state),
    (queue.SimpleQueue, operator.attrgetter("qsize")),
    (contextvars.ContextVar, lambda variable: functools.partial(variable.get, MISSING)),
    (types.GeneratorType, lambda generator: functools.partial(_generator_state, generator)),
    (set, lambda items: functools.partial(frozenset, items)),
    (collections.deque, lambda items: functools.partial(tuple, items)),
)
