"""Which steps run on a thread: none is called by an operator of another one, nor by itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from olla.errors import ReplayError

_here = threading.local()  # .is_planned: whether operators of a planned step run; .called: the steps that were called


@contextlib.contextmanager
def called(step: Any) -> Iterator[None]:
    """Run a step inside this context, from its capture on.

    Raises:
        ReplayError: it is called by one of the operators of a planned step, or by itself.
    """
    steps: list[Any] = vars(_here).setdefault("called", [])
    if getattr(_here, "is_planned", False) or any(other is step for other in steps):
        raise ReplayError(
            "a step was called while another one runs on the same thread: "
            "call it after that one has returned, not from its operators or its loss function"
        )
    steps.append(step)
    _here.is_planned = True
    try:
        yield
    finally:
        _here.is_planned = False
        steps.pop()


@contextlib.contextmanager
def unplanned() -> Iterator[None]:
    """Run what may call other steps inside this context, and inside ``called``."""
    _here.is_planned = False
    try:
        yield
    finally:
        _here.is_planned = True
