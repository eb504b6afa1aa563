"""Process-wide replacements of a capture: one capture at a time, everything restored after it."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode
from torch.utils import checkpoint

from olla.pytorch.ranks import collectives

_lock = threading.RLock()
_replaced: list[tuple[Any, str, Any, Any]] = []  # by the captures that run: owner, name, original, stand-in
_memos: collections.deque[list[Any]] = collections.deque()  # keys of torch's own that each of the latest captures added
_NUM_REMEMBERED = 8  # captures; one that is like them takes two thirds of the time
_NOTHING: Any = object()  # in place of an original that is not there
_LOGGERS = "_subclasses.fake_tensor", "_dynamo.variables.tensor", "_dynamo.metrics_context"  # the last: torch 2.11
_TRIES = [logging.getLogger(f"torch.{name}") for name in _LOGGERS]
_is_collected = False  # whether garbage is collected again once the capture that runs is over


class Deferred:
    """The signals that came since ``check`` was called last, and the handlers they wait for.

    Ctrl-C between two lines of torch's own Python would leave its modes half entered.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, Any], Any]] = {}
        self._pending: list[int] = []
        self._waits = True

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal. A second one is served at once: the step may be waiting for something."""
        if self._waits and number not in self._pending:
            self._pending.append(number)
        else:
            self._pending.clear()
            self.handlers[number](number, frame)

    def check(self) -> None:
        """Run the handlers of what came; they may raise."""
        while self._pending:
            number = self._pending.pop(0)
            self.handlers[number](number, sys._getframe())

    def install(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
                signal.signal(number, self)

    def remove(self) -> None:
        """Give the handlers back; where one of them cuts this short, the others work already."""
        self._waits = False
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Run handlers of signals only where the function that this yields is called, and at the end."""
    waiting = Deferred()
    try:
        if threading.current_thread() is threading.main_thread():  # the only one where handlers run
            waiting.install()
        yield waiting.check
    finally:
        try:
            waiting.remove()
        finally:
            waiting.remove()
            waiting.check()


@functools.cache
def _makes_tensors(func: Any) -> bool:
    """Whether an operator returns tensors; torch ends the process where its queries (of a device) raise."""
    return any(isinstance(result.type, torch.TensorType) for result in func._schema.returns)


class InterruptedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode that handles pending signals at operators that return tensors."""

    check: Callable[[], None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _makes_tensors(func):
            self.check()
        collectives.require_functional(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


class ExclusiveCapture:
    """The one capture that is under way in the process.

    Attributes:
        mode: the mode that records it, once it records.
        check: runs the handlers of the signals that came since it was called last; they may raise.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.mode: Any = None
        self.check = check
        self.is_over = False
        self._thread = threading.get_ident()

    def is_here(self) -> bool:
        """Whether the caller is captured: on the thread of the capture, or on one of autograd in its mode."""
        if self.is_over:
            return False
        return threading.get_ident() == self._thread or (self.mode is not None and get_proxy_mode() is self.mode)

    @contextlib.contextmanager
    def replaced(self, owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
        """Replace a function of the process for what is captured; all other callers reach the original."""
        original = getattr(owner, name)
        stand_ins = [function]

        def choose(*args: Any, **kwargs: Any) -> Any:
            return (stand_ins[0] if self.is_here() else original)(*args, **kwargs)

        with replaced(owner, name, choose):
            try:
                yield
            finally:
                stand_ins[:] = [original]  # a module that is imported meanwhile keeps what it finds here for ever


@contextlib.contextmanager
def capture() -> Iterator[ExclusiveCapture]:
    """Wait until no other thread captures, nor has Dynamo compile; inside, signals wait for ``check``."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    with _lock, contextlib.nullcontext() if dynamo is None else dynamo.compile_lock, deferred() as check:
        found = ExclusiveCapture(check)
        try:
            yield found
        finally:
            found.is_over, found.mode = True, None


def unwatched_operators(capture: ExclusiveCapture, note: Callable[[], None]) -> AbstractContextManager[None]:
    """Record operators with __torch_function__ modes and the trace function that watches entered code switched off.

    In a backward pass both are on, and torch's own Python behind each operator calls hundreds of functions.

    Args:
        capture: under way.
        note: called after each operator.
    """
    record: Any = ProxyTorchDispatchMode.__torch_dispatch__

    def record_unwatched(*args: Any, **kwargs: Any) -> Any:
        watching = sys.gettrace()
        sys.settrace(None)
        try:
            with torch._C.DisableTorchFunction():
                result = record(*args, **kwargs)
            note()
            return result
        finally:
            sys.settrace(watching)

    return capture.replaced(ProxyTorchDispatchMode, "__torch_dispatch__", record_unwatched)


def checkpoints(capture: ExclusiveCapture) -> AbstractContextManager[None]:
    """Let selective activation checkpointing recompute in a trace, where it would only mark nodes otherwise."""
    if not hasattr(checkpoint, "_is_compiling"):
        return contextlib.nullcontext()
    return capture.replaced(checkpoint, "_is_compiling", lambda *_: False)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module, leaves: list[Any]) -> Iterator[None]:
    """Undo what a forward pass on fake tensors leaves in modules and batch: caches, replaced buffers, attributes."""
    tables = [t for m in model.modules() for t in (m.__dict__, m._buffers, m._parameters, m._modules)]
    tables += [vars(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    saved = [dict(table) for table in tables]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        clear_fake_caches()
        for parameter, gradient in gradients:
            if isinstance(parameter.grad, FakeTensor):
                parameter.grad = gradient
        for table, before in zip(tables, saved, strict=True):
            if list(table) != list(before) or any(table[key] is not before[key] for key in before):
                table.clear()
                table.update(before)


class Silence(logging.Filter):
    """Silences torch's warnings of what it cannot do with fake tensors: an error or a report says it anyway.

    A context manager. Torch would print thirty lines at each attempt.
    """

    def __enter__(self) -> None:
        for logger in _TRIES:
            logger.addFilter(self)

    def __exit__(self, *_: object) -> None:
        for logger in _TRIES:
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to print a record: those below warnings, which somebody has switched on, are."""
        return record.levelno < logging.WARNING


@contextlib.contextmanager
def bounded_memos() -> Iterator[None]:
    """Keep entries of torch's fake tensor cache for the latest captures only."""
    before = last_memo()
    try:
        yield
    finally:
        bound_memos(before)


def last_memo() -> Any:
    """Return the latest key in torch's fake tensor cache; None: it is empty."""
    return next(reversed(getattr(FakeTensorMode, "cache", {})), None)


def bound_memos(before: Any) -> None:
    """Note the cache entries that a finished capture has made, and delete those of the oldest ones.

    Args:
        before: what ``last_memo`` returned before the capture.
    """
    memos: dict[Any, Any] = getattr(FakeTensorMode, "cache", {})
    _memos.append(list(itertools.takewhile(lambda key: key is not before, reversed(memos))))
    while len(_memos) > _NUM_REMEMBERED:
        for key in _memos.popleft():
            memos.pop(key, None)


def clear_fake_caches() -> None:
    """Empty functools caches that a capture has filled with fake tensors, which later callers would be given.

    Complexity: O(objects that the garbage collector knows), some 20 ms.
    """
    for cache in gc.get_objects():
        if type(cache) is functools._lru_cache_wrapper and cache.cache_info().currsize and _holds_fakes(cache):
            cache.cache_clear()


@contextlib.contextmanager
def released(capture: ExclusiveCapture) -> Iterator[None]:
    """Let go, at the end of a trace, of what operators have saved of their results for a backward pass that never came.

    Since torch 2.14 that is an alias of the result on stand-ins, which leads back to the operator: a cycle that the
    garbage collector does not see.
    """
    try:
        yield
    finally:
        for tensor in list(capture.mode.tracer.tensor_tracker) if capture.mode is not None else ():
            if tensor.grad_fn is not None and tensor.grad_fn.name() == "AliasBackward0":
                _release(tensor.grad_fn.next_functions[0][0])


def _release(operator: Any) -> None:
    """Let go of what an operator has saved for its backward pass."""
    for name in dir(operator):
        saved = getattr(operator, name) if name.startswith("_raw_saved_") else ()
        for entry in saved if isinstance(saved, tuple | list) else (saved,):
            with contextlib.suppress(RuntimeError):  # the user's own hooks hold it, or it is gone
                entry.register_hooks(lambda _: None, lambda _: None)


def _holds_fakes(cache: object) -> bool:
    """Whether a cache holds a fake tensor, alone or in lists, tuples and dicts."""
    waiting, seen = gc.get_referents(cache), set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, FakeTensor):
            return True
        if type(value) in (tuple, list, dict) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return False


def between() -> AbstractContextManager[Any]:
    """Wait until no other thread captures: modules that it captures hold fake tensors meanwhile."""
    return _lock


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Switch the garbage collector off: nearly all objects of a capture are reachable until its end.

    Each collection goes through all of torch's objects, too, a tenth of a second or two.
    """
    global _is_collected
    with _lock:
        if not gc.isenabled():
            yield
            return
        try:
            _is_collected = True
            gc.disable()
            yield
        finally:
            gc.enable()
            _is_collected = False


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class for all threads; what another one puts there meanwhile stays."""
    original = inspect.getattr_static(owner, name, _NOTHING)
    _replaced.append((owner, name, original, value))
    setattr(owner, name, value)
    try:
        yield
    finally:
        _restore(*_replaced.pop())


def _restore(owner: Any, name: str, original: Any, value: Any) -> None:
    if inspect.getattr_static(owner, name, _NOTHING) is not value:
        return
    if original is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _after_fork() -> None:
    """Give a child what its parent had before the capture that another thread of the parent was busy with."""
    global _lock
    _lock = threading.RLock()
    if (dynamo := sys.modules.get("torch._dynamo.convert_frame")) is not None:
        dynamo.compile_lock = threading.RLock()  # type: ignore[attr-defined]
    while _replaced:
        _restore(*_replaced.pop())
    if _is_collected:
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
