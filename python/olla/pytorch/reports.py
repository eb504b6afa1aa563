"""What became of a step, for its report: in the arena, by its goal, by swaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olla.plan import Plan
from olla.pytorch.memory.replay import Counters, Miss
from olla.report.step import BudgetReport, SwapReport

_NUM_MISSES = 5  # named in the report


@dataclass
class Seen:
    """What happened in the arena since the step was recorded."""

    num_steps: int = 0
    peak_bytes: int = 0  # in the arena and missed
    num_misses: int = 0
    missed_bytes: int = 0
    misses: tuple[Miss, ...] = ()

    def add(self, step: Counters) -> None:
        self.num_steps += 1
        self.peak_bytes = max(self.peak_bytes, step.peak_bytes + step.missed_bytes)
        self.num_misses += step.num_misses
        self.missed_bytes += step.missed_bytes
        self.misses = (*self.misses, *step.misses)[:_NUM_MISSES]


def added_seconds(seconds: NDArray[np.float64], found: Plan) -> float:
    """Return the time of the runs beyond one of each op.

    Args:
        seconds: float64[n], of each op of the last graph.
        found: says which of them run again.
    """
    recomputed, swapped = found.recomputed, found.swapped
    if recomputed is None:
        return 0.0
    if swapped is not None:
        own, of_ops = swapped.origin >= 0, np.zeros(recomputed.graph.num_ops)
        of_ops[swapped.origin[own]] = seconds[own]
        seconds = of_ops
    again, origin = recomputed.rerun != 0, recomputed.origin
    num_runs = np.bincount(origin, minlength=int(origin.max(initial=-1)) + 1)
    own_runs = np.bincount(origin[~again], minlength=len(num_runs))
    runs = np.bincount(origin[again], weights=seconds[again], minlength=len(num_runs))
    of_again = num_runs - own_runs
    mean = np.divide(runs, of_again, out=np.zeros(len(num_runs)), where=of_again > 0)
    extra = np.where(own_runs > 0, runs, runs - mean)
    return float(extra.sum())


def budget_report(
    found: Plan, budget_bytes: int | None, seconds: NDArray[np.float64], stall_seconds: float | None
) -> BudgetReport | None:
    """Return what a goal made of a step; None where nothing was rewritten.

    Args:
        found: the plan.
        budget_bytes: the budget, if there is one.
        seconds: float64[n], as recorded of each op; zeros where nothing was.
        stall_seconds: that ops waited for copies in the latest step, if known.
    """
    if not found.rewrites:
        return None
    swapped, chunked = found.swapped, found.chunked
    recorded = float((seconds if swapped is None else seconds[swapped.origin >= 0]).sum())
    again = added_seconds(seconds, found)
    added = again + (stall_seconds or 0.0) if recorded else None
    return BudgetReport(
        budget_bytes=budget_bytes,
        unbudgeted_peak_bytes=found.base_peak_bytes,
        peak_lower_bound_bytes=found.peak_lower_bound_bytes,
        num_recomputed=found.num_recomputed,
        num_in_place=found.num_in_place,
        planned_slowdown=found.slowdown,
        measured_slowdown=None if added is None else added / max(recorded - again, 1e-12),
        measured_added_seconds=added,
        num_chunked_losses=chunked.num_losses if chunked else 0,
    )


def swap_report(
    found: Plan, host_bytes: int, host_budget_bytes: int | None, stall_seconds: float | None
) -> SwapReport | None:
    """Return what was swapped; None where the plan does not swap."""
    if found.swapped is None:
        return None
    swaps = found.swapped.swaps
    return SwapReport(
        num_swaps=len(swaps.tensor),
        swapped_bytes=swaps.swapped_bytes,
        host_bytes=host_bytes,
        host_budget_bytes=host_budget_bytes,
        planned_stall_seconds=swaps.stall_seconds,
        measured_stall_seconds=stall_seconds,
    )
