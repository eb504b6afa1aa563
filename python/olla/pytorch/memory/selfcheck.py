"""The first steps at planned addresses are held against the plan, and against what torch's own allocator counts."""

from __future__ import annotations

import torch

from olla.pytorch.memory.arrange import Arranged
from olla.pytorch.memory.replay import Counters

_MAX_STEPS = 3  # other threads allocate too, and their bytes count in torch's statistics


class SelfCheck:
    """Whether steps take what was planned: one that does is enough.

    Args:
        device: type of the device that the step runs on. On a CPU torch does not count what it gives.
        is_open: whether the next step is to be looked at; an attribute, too.
    """

    def __init__(self, device: str, is_open: bool) -> None:
        self.is_open = is_open
        self._counts = device == "cuda"
        self._num_steps = 0
        self._before = 0

    def begin(self) -> None:
        """Note what torch's allocator has given so far; the arena is there already."""
        self._before = self._requested()

    def difference(self, counters: Counters, arranged: Arranged) -> str:
        """Return what the step took beyond its plan, for a person; empty: nothing, or the next step may show it."""
        self._num_steps += 1
        table = arranged.table
        planned = int(table.num_bytes[table.offsets < 0].sum())
        more = self._requested() - self._before - planned
        parts = [
            f"{counters.num_misses} requests of {counters.missed_bytes} bytes had no place" * (counters.num_misses > 0),
            f"the arena held {counters.peak_bytes} bytes at once, not {arranged.load_bytes}"
            * (counters.peak_bytes > arranged.load_bytes),
            f"torch's allocator gave {more} bytes more than planned" * (more > 0),
        ]
        found = ", ".join(part for part in parts if part)
        self.is_open = bool(found) and self._num_steps < _MAX_STEPS
        return "" if self.is_open else found

    def _requested(self) -> int:
        """Return the bytes that torch's allocator was asked for since the process began."""
        return int(torch.cuda.memory_stats().get("requested_bytes.all.allocated", 0)) if self._counts else 0
