"""Comparison of the first steps at planned addresses with their plan."""

from __future__ import annotations

from olla.pytorch.memory.arrange import Arranged
from olla.pytorch.memory.replay import Counters

_MAX_STEPS = 3  # the first one may fill caches that libraries keep


class SelfCheck:
    """Checks that a step takes no more memory than planned: one such step ends the check.

    Args:
        device: type of the device that the step runs on. On a CPU the bytes of the default allocator are not
            counted: states of random generators come from it and are not planned.
        is_open: whether the next step is to be looked at; an attribute, too.
    """

    def __init__(self, device: str, is_open: bool) -> None:
        self.is_open = is_open
        self._counts_given = device == "cuda"
        self._num_steps = 0

    def difference(self, counters: Counters, arranged: Arranged) -> str:
        """Return, in words, what the step took beyond its plan; empty: nothing, or later steps decide."""
        self._num_steps += 1
        table = arranged.table
        planned = int(table.num_bytes[table.offsets < 0].sum())
        more = counters.given_bytes - planned if self._counts_given else 0
        parts = [
            f"{counters.num_misses} requests of {counters.missed_bytes} bytes had no place" * (counters.num_misses > 0),
            f"the arena held {counters.peak_bytes} bytes at once, not {arranged.load_bytes}"
            * (counters.peak_bytes > arranged.load_bytes),
            f"torch's allocator gave {more} bytes more than planned" * (more > 0),
        ]
        found = ", ".join(part for part in parts if part)
        self.is_open = bool(found) and self._num_steps < _MAX_STEPS
        return "" if self.is_open else found
