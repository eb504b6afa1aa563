"""A progress line on the terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from olla.base import cells, human_bytes, visible

if TYPE_CHECKING:
    from rich.status import Status


class ProgressLine:
    """A line on standard error for work that takes over a second.

    Where standard error is no terminal nothing is shown, or with `lines` a line for every new stage, up to its colon.
    """

    def __init__(self, title: str, *, lines: bool = False) -> None:
        self.title = title
        self.lines = lines
        self.stage = ""
        self.status: Status | None = None
        self.timer: threading.Timer | None = None

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty():
            from rich.console import Console

            self.status = Console(stderr=True).status(*cells(self.title))
            self.timer = threading.Timer(1.0, self.status.start)
            self.timer.daemon = True
            self.timer.start()
        return self

    def __call__(self, stage: str, seconds: float, value: int, bound: int) -> bool:
        """Show how a search stands; see the progress argument of `olla.plan`. Without a value only the stage."""
        if self.status is not None:
            figures = f": {human_bytes(value)}, bound {human_bytes(bound)}" if value else ""
            state = f"{stage} {seconds:.0f} s{figures}"
            self.status.update(*cells(f"{self.title}: {state} (Ctrl-C ends it with the best so far)"))
        elif self.lines and (begun := stage.partition(":")[0]) != self.stage:
            self.stage = begun
            with suppress(OSError):
                print("olla:", visible(f"{self.title}: {begun}"), file=sys.stderr, flush=True)
        return True

    def __exit__(self, *error: object) -> None:
        if self.timer is not None and self.status is not None:
            self.timer.cancel()
            self.timer.join()
            self.status.stop()
