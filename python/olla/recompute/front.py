"""The best of all choices that were simulated, on any base order: the one table that every goal is looked up in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla._core import RecomputeSearch, RecomputeTarget


class Start(NamedTuple):
    """A base order, and what is chosen on it."""

    order: NDArray[np.int32]
    evictor: RecomputeSearch


def target(peak_bytes: int, added_seconds: float | None) -> RecomputeTarget:
    """Return the target: the least added time within a peak, or, given an added time, the least peak within that."""
    most = math.inf if added_seconds is None else added_seconds
    return RecomputeTarget(least_time=added_seconds is None, peak=peak_bytes, added_seconds=most)


def recall(starts: Sequence[Start], peak_bytes: int, added_seconds: float | None) -> Start | None:
    """Put the best choice for a target in force on its base order, and return that; None where no choice meets it."""

    def reached(start: Start) -> tuple[float, float]:
        front = start.evictor.front()
        peaks, seconds = front.peak_bytes, front.added_seconds  # the one rises, the other falls
        if added_seconds is None:
            i = int(np.searchsorted(peaks, peak_bytes, "right")) - 1
            return (float(seconds[i]), float(peaks[i])) if i >= 0 else (math.inf, math.inf)
        i = int(np.sum(seconds > added_seconds))
        return (float(peaks[i]), float(seconds[i])) if i < len(peaks) else (math.inf, math.inf)

    best = min(starts, key=reached)
    return best if best.evictor.recall(target(peak_bytes, added_seconds)) else None
