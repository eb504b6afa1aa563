"""The choice: what forward saves for backward, and what backward runs again, by the peak of both as they are fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from olla.budgets import Goal

if TYPE_CHECKING:
    from olla import _core
    from olla.inductor.joint import Joint

_UNLIMITED = 1e30
_SEED_SECONDS = 1.0  # of one minimum cut; a guard, it takes a thousandth
_RUN_SECONDS = 10.0  # of one greedy, the same
# Prices of time for the cuts the greedy starts from, as multiples of (bytes all saved) / (seconds of the step).
_PRICES = 2.0 ** np.arange(-4, 13)


@dataclass(frozen=True)
class Choice:
    """What was chosen, as the planner sees it.

    Attributes:
        peak_bytes: most memory live at once in forward and backward, with inputs and gradients.
        added_seconds: of what runs again, estimated.
        values, runs: of the core's Evictor: what runs, in order.
        recomputed_flops: of matrix products, convolutions and attention that run again.
        saved_peak_bytes: the peak with everything saved.
    """

    peak_bytes: int
    added_seconds: float
    values: dict[str, Any]
    runs: dict[str, Any]
    recomputed_flops: int
    saved_peak_bytes: int


@dataclass(frozen=True)
class _Point:
    """A plan on some curve: its figures, and the drops that make it."""

    peak: int
    added: float
    values: NDArray[np.int32]
    steps: NDArray[np.int32]


def choose(joint: Joint, goal: Goal) -> Choice:
    """Return the best plan for a goal among the curves of all starts.

    The plans that are compared do not depend on the goal, so less memory asked for never takes more, and more time
    allowed never needs more memory. Where none fits a budget, the one of least peak is returned.

    Complexity:
        A few thousand simulations, each O(nodes + edges).
    """
    evictor = joint.evictor()
    saved_peak = evictor.peak
    points = _points(joint, evictor)
    best = _pick(points, joint, goal)
    evictor.reset(best.values, best.steps)
    runs = evictor.runs()
    again = runs["op"][runs["again"] == 1]
    return Choice(
        peak_bytes=evictor.peak,
        added_seconds=evictor.added_seconds,
        values=evictor.values,
        runs=runs,
        recomputed_flops=int(joint.flops[again].sum()),
        saved_peak_bytes=saved_peak,
    )


def _pick(points: list[_Point], joint: Joint, goal: Goal) -> _Point:
    by_peak = min(points, key=lambda p: (p.peak, p.added))
    if goal.minimise is not None:
        return by_peak
    if goal.max_slowdown is not None:
        limit = points[0].added + goal.max_slowdown * joint.step_seconds  # beyond what the user has run again
        fitting = [p for p in points if p.added <= limit]
        return min(fitting, key=lambda p: (p.peak, p.added))
    assert goal.budget_bytes is not None
    fitting = [p for p in points if p.peak <= goal.budget_bytes]
    return min(fitting, key=lambda p: (p.added, p.peak)) if fitting else by_peak


def _points(joint: Joint, evictor: _core.Evictor) -> list[_Point]:
    """Return the plans on the greedy's curves from every start: nothing dropped, and the minimum cuts at all prices.

    The first is the one that drops nothing.
    """
    nothing = np.zeros(0, dtype=np.int32)
    starts = [nothing]
    scale = evictor.peak / joint.step_seconds
    for price in _PRICES * scale:
        dropped = evictor.made_again(joint.split, float(price), _SEED_SECONDS)
        if not any(np.array_equal(dropped, start) for start in starts):
            starts.append(dropped)
    points: list[_Point] = []
    for start in starts:
        last = np.full(len(start), joint.split - 1, dtype=np.int32)
        if not evictor.reset(start, last):
            continue
        evictor.run(0, _UNLIMITED, _RUN_SECONDS, None)
        peaks, seconds, num_decisions = evictor.curve()
        values, steps, offset = evictor.decisions()
        for peak, added, end in zip(peaks.tolist(), seconds.tolist(), offset[num_decisions].tolist(), strict=True):
            points.append(_Point(peak, added, values[:end], steps[:end]))
    return points
