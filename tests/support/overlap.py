"""Whether a layout is one: a check that shares nothing with the planner, fast enough for a million buffers."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def overlapping(lower: Int64Array, upper: Int64Array, size: Int64Array, offsets: Int64Array) -> int:
    """Find a buffer that begins below the end of another one, alive with it, that begins no higher; -1 if none does.

    Time is swept: those alive are kept by their offset, and whoever begins to live is compared with its neighbours.

    Complexity: O(m log m) comparisons.
    """
    alive = np.flatnonzero((lower < upper) & (size > 0))
    times, births = np.concatenate([upper[alive], lower[alive]]), np.repeat([0, 1], len(alive))
    events = np.lexsort((births, times)).tolist()  # those that end first
    rows = list(zip(offsets[alive].tolist(), (offsets + size)[alive].tolist(), alive.tolist(), strict=True))
    now: list[tuple[int, int, int]] = []
    for event in events:
        row = rows[event % len(rows)]
        if event < len(rows):
            del now[bisect_left(now, row)]
            continue
        at = bisect_left(now, row)
        if at > 0 and now[at - 1][1] > row[0]:
            return row[2]
        if at < len(now) and now[at][0] < row[1]:
            return now[at][2]
        insort(now, row)
    return -1


def highest_end(lower: Int64Array, upper: Int64Array, size: Int64Array, offsets: Int64Array) -> int:
    """Return the height: the largest end of a buffer that is ever alive."""
    alive = (lower < upper) & (size > 0)
    return int((offsets[alive] + size[alive]).max(initial=0))
