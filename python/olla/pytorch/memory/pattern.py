"""Common pattern of a loop's iterations: the same requests for memory, or as many of other sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from olla.layout.requests import NEVER, Trace
from olla.pytorch.memory.replay import Int64, Iteration

_MAX_WASTE = 0.1  # of the larger load: sizes that do not rise together, as of two models, are no lengths of one kind
_ALIKE = 0.99  # of the requests that end inside: freed at the same points in iterations of other lengths


@dataclass(frozen=True, eq=False)
class Pattern:
    """The requests of iterations of one kind.

    Attributes:
        trace: each request with its largest size and its longest life.
        inside: bool[m], whether it is freed before its iteration ends.
        least: int64[m], bytes: the smallest size that a request may have. 1 where it varies, else its size.
    """

    trace: Trace
    inside: npt.NDArray[np.bool_]
    least: Int64

    def is_like(self, now: Iteration) -> bool:
        """Whether an iteration makes as many requests, freed at the same points."""
        if len(now.num_bytes) != self.trace.num_requests or not np.array_equal(now.freed_inside, self.inside):
            return False
        same = now.freed_at[self.inside] - now.start == self.trace.freed_at[self.inside]
        return bool(same.sum() >= _ALIKE * len(same))

    def with_sizes(self, num_bytes: Int64) -> Pattern:
        """Return the pattern with an iteration of other sizes."""
        least = np.where(num_bytes == self.trace.num_bytes, self.least, 1)
        return Pattern(Trace(np.maximum(self.trace.num_bytes, num_bytes), self.trace.freed_at), self.inside, least)

    def shrunk(self, num_bytes: Int64) -> Pattern:
        """Return the pattern with the sizes of one of its iterations as the largest."""
        return Pattern(Trace(num_bytes, self.trace.freed_at), self.inside, np.minimum(self.least, num_bytes))

    def joined(self, other: Pattern) -> Pattern:
        """Return the pattern of iterations of both; they have as many requests."""
        found = self.with_sizes(other.trace.num_bytes)
        return Pattern(found.trace, found.inside, np.minimum(found.least, other.least))

    def is_compact(self, alignment: int, *sizes: Int64) -> bool:
        """Whether the load is at most _MAX_WASTE above the largest load of iterations with these sizes."""
        loads = [Trace(num_bytes, self.trace.freed_at).load_bytes(alignment) for num_bytes in sizes]
        return self.trace.load_bytes(alignment) <= (1 + _MAX_WASTE) * max(loads)


def repeated(before: Iteration, after: Iteration, *, same_sizes: bool = True) -> Pattern | None:
    """Return the common pattern of two iterations of a loop; None if their requests or frees differ.

    Args:
        before: may be any number of iterations earlier.
        after: the one that ended last.
        same_sizes: whether their sizes must be equal; else the points at which requests are freed tell that they are of
            one kind.

    Complexity: O(requests).
    """
    m = len(before.num_bytes)
    if m == 0 or m != len(after.num_bytes) or not np.array_equal(before.freed_inside, after.freed_inside):
        return None
    if same_sizes and not np.array_equal(before.num_bytes, after.num_bytes):
        return None
    inside = before.freed_inside
    # What iterations between the two freed was alive to the end of the first, and is gone when the second begins.
    crossing = np.where(before.freed_at < 0, NEVER, m + np.maximum(before.freed_at - after.start, 0))
    within = np.maximum(before.freed_at - before.start, after.freed_at - after.start)
    found = Pattern(Trace(before.num_bytes, np.where(inside, within, crossing)), inside, before.num_bytes)
    return found.with_sizes(after.num_bytes) if same_sizes or found.is_like(after) else None
