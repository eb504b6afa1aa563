"""Handlers of signals that wait: Ctrl-C between two lines of torch's own Python would leave its modes half entered."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[[int, Any], Any]


class Deferred:
    """The signals that came since ``check`` was called last, and the handlers they wait for."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
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
