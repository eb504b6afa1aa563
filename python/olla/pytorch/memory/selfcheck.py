"""The first steps at planned addresses are held against the plan."""

from __future__ import annotations

from olla.pytorch.memory.arrange import Arranged
from olla.pytorch.memory.replay import Counters

_MAX_STEPS = 3  # the first one may fill caches that libraries keep


class SelfCheck:
    """Whether steps take what was planned: one that does is enough.

    Args:
        device: type of the device that the step runs on. On a CPU, where states of random generators come from the
            same allocator and are in no plan, what that gives is not counted.
        is_open: whether the next step is to be looked at; an attribute, too.
    """

    def __init__(self, device: str, is_open: bool) -> None:
        self.is_open = is_open
        self._counts_given = device == "cuda"
        self._num_steps = 0

    def difference(self, counters: Counters, arranged: Arranged) -> str:
        """Return what the step took beyond its plan, for a person; empty: nothing, or the next step may show it."""
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
