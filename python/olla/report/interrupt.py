"""Ctrl-C that ends a search with the best it has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """While it is open, the first Ctrl-C asks a search to end, through its progress callback; the second raises.

    So a plan that was found is never lost, whichever line the signal meets.

    Attributes:
        seen: whether Ctrl-C came.

    Example:
        >>> with Interrupt() as interrupt:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interrupt.ends(lambda *_: True)("order", 0.0, 0, 0)
        False
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            signal.default_int_handler(number, frame)
        self.seen = True

    def ends(self, progress: Callable[[str, float, int, int], bool]) -> Callable[[str, float, int, int], bool]:
        """Return a progress callback that ends the search once Ctrl-C came."""
        return lambda stage, seconds, value, bound: not self.seen and progress(stage, seconds, value, bound)
