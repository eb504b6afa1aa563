"""The memory that this process has had resident, before and since a moment."""

from __future__ import annotations

import contextlib
import sys
import weakref
from pathlib import Path
from typing import ClassVar

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ProcessPeak:
    """The most bytes that the process had resident before ``begin`` was called last, and since then.

    Linux counts that itself, in VmHWM, which ``begin`` lets start anew; elsewhere there is only the peak so far.

    Attributes:
        before_bytes: the most from the start of the process, or from the last ``begin`` of anyone, to this one; None
            before it, and where the system does not say.
    """

    _begun: ClassVar[weakref.WeakSet[ProcessPeak]] = weakref.WeakSet()  # VmHWM is the process's

    def __init__(self) -> None:
        self.before_bytes: int | None = None
        self._since: int | None = None

    def begin(self) -> None:
        """Note the peak so far, and count anew."""
        most = _peak_bytes()
        if most is None:
            return
        self._begun.discard(self)
        for other in self._begun:
            other._since = max(other._since or 0, most)
        self.before_bytes = max(most, self._since or 0, self.before_bytes or 0)
        self._since = None
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")
            self._since = 0
            self._begun.add(self)

    @property
    def since_bytes(self) -> int | None:
        """The most since ``begin``; None where it was not called, or where the system cannot count anew."""
        most = _peak_bytes()
        return None if self._since is None or most is None else max(self._since, most)


def _peak_bytes() -> int | None:
    """Return the most bytes that this process had resident; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):  # there is none on Windows
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return None
