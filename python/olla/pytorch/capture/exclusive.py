"""What a capture replaces in the process while it lasts: one capture at a time, and everything is back after it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode

from olla.pytorch.capture.signals import deferred

_lock = threading.RLock()
_replaced: list[tuple[Any, str, Any, Any]] = []  # by the captures that run: owner, name, original, stand-in
_is_collected = False  # whether garbage is collected again once the capture that runs is over


class Capture:
    """A capture that is under way, and no other beside it.

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
        """Whether the caller is captured: on the thread of the capture, or where autograd goes on with it."""
        if self.is_over:
            return False
        return threading.get_ident() == self._thread or (self.mode is not None and get_proxy_mode() is self.mode)

    @contextlib.contextmanager
    def replaced(self, owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
        """Replace a function of the process for what is captured; all other callers reach the original."""
        original = getattr(owner, name)

        def choose(*args: Any, **kwargs: Any) -> Any:
            return (function if self.is_here() else original)(*args, **kwargs)

        with replaced(owner, name, choose):
            yield


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Wait until no other thread captures; inside, signals wait for ``check``."""
    with _lock, deferred() as check:
        found = Capture(check)
        try:
            yield found
        finally:
            found.is_over = True


@contextlib.contextmanager
def unwatched_operators(capture: Capture) -> Iterator[None]:
    """Record operators without asking modes for functions of torch, and without watching which code is entered.

    In a backward pass both are on, and torch's own Python behind each operator calls hundreds of functions.
    """
    record: Any = ProxyTorchDispatchMode.__torch_dispatch__

    def record_unwatched(*args: Any, **kwargs: Any) -> Any:
        watching = sys.gettrace()
        sys.settrace(None)
        try:
            with torch._C.DisableTorchFunction():
                return record(*args, **kwargs)
        finally:
            sys.settrace(watching)

    with capture.replaced(ProxyTorchDispatchMode, "__torch_dispatch__", record_unwatched):
        yield


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
        for parameter, gradient in gradients:
            if isinstance(parameter.grad, FakeTensor):
                parameter.grad = gradient
        for table, before in zip(tables, saved, strict=True):
            if list(table) != list(before) or any(table[key] is not before[key] for key in before):
                table.clear()
                table.update(before)


@contextlib.contextmanager
def between() -> Iterator[None]:
    """Wait until no other thread captures: modules that it captures hold fake tensors meanwhile."""
    with _lock:
        yield


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Let nobody look for unreachable cycles: nearly all that a capture makes is reachable until its end.

    Each look goes through all of torch's objects, too, a tenth of a second or two.
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
    """Replace an attribute of a module for all threads; what another one puts there meanwhile stays."""
    original = getattr(owner, name)
    _replaced.append((owner, name, original, value))
    setattr(owner, name, value)
    try:
        yield
    finally:
        _restore(*_replaced.pop())


def _restore(owner: Any, name: str, original: Any, value: Any) -> None:
    if getattr(owner, name) is value:
        setattr(owner, name, original)


def _after_fork() -> None:
    """Give a child what its parent had before the capture that another thread of the parent was busy with."""
    global _lock
    _lock = threading.RLock()
    while _replaced:
        _restore(*_replaced.pop())
    if _is_collected:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
