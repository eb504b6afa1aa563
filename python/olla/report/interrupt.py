"""Ctrl-C that ends a search with the best it has."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from olla.base import Progress


class Interrupt:
    """While it is open, Ctrl-C asks a search that has begun to end, through its progress callback; a second one raises.

    So a plan that was found is never lost, whichever line the signal meets. Before a search has begun nothing is lost,
    and the first one raises. Where Ctrl-C has another handler than Python's, that one stays.

    Attributes:
        seen: whether Ctrl-C came.

    Example:
        >>> with Interrupt() as interrupt:
        ...     progress = interrupt.ends(lambda *_: True)
        ...     progress("order", 0.0, 0, 0)
        ...     signal.raise_signal(signal.SIGINT)
        ...     progress("order", 0.1, 0, 0)
        True
        False
    """

    def __init__(self) -> None:
        self.seen = False
        self._has_begun = False
        self._before: Any = None
        self._outer: Interrupt | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            before = signal.getsignal(signal.SIGINT)
            outer = getattr(before, "__self__", None)
            self._outer = outer if isinstance(outer, Interrupt) else None
            if self._outer is not None or before is signal.default_int_handler:
                self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.seen or not self._has_begun:
            signal.default_int_handler(number, frame)
        self._note()

    def _note(self) -> None:
        self.seen = True
        if self._outer is not None:
            self._outer._note()

    def ends(self, progress: Progress) -> Progress:
        """Return a progress callback that ends the search once Ctrl-C came."""

        def ending(stage: str, seconds: float, value: int, bound: int) -> bool:
            self._has_begun = True
            answer = None if self.seen else progress(stage, seconds, value, bound)
            return not self.seen and (answer is None or bool(answer))

        return ending
