"""Whether a layout is one: a check that shares nothing with the planner, fast enough for a million buffers."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def overlapping(lower: Int64Array, upper: Int64Array, size: Int64Array, offsets: Int64Array) -> int:
    """Find a buffer that begins below the end of another one, alive with it, that begins no higher; -1 if none does.

    Buffers are painted from below: the times a buffer is alive take its end as their height, which at every time only
    rises as long as there is no overlap.

    Complexity: O(m log m).
    """
    alive = np.flatnonzero((lower < upper) & (size > 0))
    times = np.unique(np.concatenate([lower[alive], upper[alive]]))
    from_below = alive[np.argsort(offsets[alive], kind="stable")]
    first, last = np.searchsorted(times, lower[from_below]), np.searchsorted(times, upper[from_below])
    begins = offsets[from_below]
    num_leaves = 1 << len(times).bit_length()
    position = int(_paint(first, last, begins, begins + size[from_below], num_leaves))
    return int(from_below[position]) if position >= 0 else -1


def highest_end(lower: Int64Array, upper: Int64Array, size: Int64Array, offsets: Int64Array) -> int:
    """Return the height: the largest end of a buffer that is ever alive."""
    alive = (lower < upper) & (size > 0)
    return int((offsets[alive] + size[alive]).max(initial=0))


@numba.njit(cache=False)
def _paint(first: Any, last: Any, begins: Any, ends: Any, num_leaves: int) -> int:
    """Return the first i whose times are painted above begins[i] already, else -1; num_leaves is a power of two."""
    # The highest end that covers all of a node's times, and the highest anywhere in them.
    covering, within = np.zeros(2 * num_leaves, np.int64), np.zeros(2 * num_leaves, np.int64)
    for i in range(len(first)):
        low, high = first[i] + num_leaves, last[i] + num_leaves
        for paint in (False, True):
            left, right = low, high
            while left < right:
                for node in (left if left & 1 else 0, right - 1 if right & 1 else 0):
                    if node and paint:
                        covering[node] = within[node] = max(within[node], ends[i])
                    elif node and within[node] > begins[i]:
                        return i
                left, right = (left + 1) >> 1, right >> 1
            for leaf in (low, high - 1):
                node = leaf >> 1
                while node > 0:
                    if paint:
                        within[node] = max(covering[node], within[2 * node], within[2 * node + 1])
                    elif covering[node] > begins[i]:
                        return i
                    node >>= 1
    return -1
