"""AutoSwap on its own: the order stays, nothing runs again."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from olla import _core
from olla.errors import BudgetError
from olla.graph import Graph, Rules
from olla.plan import Options, Plan, Swapped, Swapping, Swaps
from olla.swap.autoswap import SCORES, AutoSwap
from olla.swap.bound import SwapBound
from olla.swap.graph import swapped_graph

_SHARE = 0.6  # of the time limit, for the choice


class AutoSwapSearch:
    """What AutoSwap copies to host memory, on the program order or on the one in the options.

    Args:
        graph: the training step.
        rules: of its ops; their seconds count.
        options: of `olla.plan`; its time limit counts from here on.
        swapping: how tensors may be swapped.
    """

    details: tuple[str, ...] = ()

    def __init__(self, graph: Graph, rules: Rules, options: Options, swapping: Swapping) -> None:
        self.graph, self.rules, self.options, self.swapping = graph, rules, options, swapping
        program = np.arange(graph.num_ops, dtype=np.int32)
        self.order = program if options.order is None else options.order.astype(np.int32)
        self.base_peak_bytes = _core.profile(graph.core, self.order).peak_bytes
        self.base_seconds = float(rules.seconds.sum())
        deadline = time.perf_counter() + _SHARE * options.time_limit
        self.method = AutoSwap(graph, self.order, rules.seconds, swapping.link, swapping.host_bytes, deadline)
        self.lowest_bytes = 2**62

    def least(self, added_seconds: float) -> tuple[Swapped]:
        """Find the least peak for which ops wait at most so many seconds."""
        slowdown = added_seconds / self.base_seconds if self.base_seconds > 0 else 0.0
        found = (self.method.least_peak(score, slowdown) for score in SCORES)
        return self._swapped(min(found, key=lambda swaps: swaps.peak_bytes))

    def within(self, peak_bytes: int) -> tuple[Swapped] | None:
        """Find the least stall for a peak; None where that is not reached."""
        found = [self.method.at_limit(score, peak_bytes) for score in SCORES]
        self.lowest_bytes = min(self.lowest_bytes, *(swaps.peak_bytes for swaps in found))
        fitting = [s for s in found if s.peak_bytes <= peak_bytes and s.host_bytes <= self.method.host_bytes]
        return self._swapped(min(fitting, key=lambda swaps: swaps.stall_seconds)) if fitting else None

    def _swapped(self, swaps: Swaps) -> tuple[Swapped]:
        return (swapped_graph(self.graph, self.order, swaps),)

    def last_resort(self, budget_bytes: int) -> None:
        """There is none."""

    def final_options(self) -> Options:
        """Return the options by which the graph that was found is laid out; its order says it all."""
        return replace(self.options, method="program", precedences=(), updates_may_move=True)

    def bounds(self, plan: Plan, added_seconds: float, peak_bytes: int) -> tuple[int, float]:
        """Return what is proved about every other plan that keeps what ops make; see `RecomputeSearch.bounds`."""
        bound = SwapBound(self.graph, self.rules, self.swapping.link, self.swapping.host_bytes)
        return bound.of(plan, added_seconds, peak_bytes)

    def refused(self, budget_bytes: int) -> BudgetError:
        """Return the error for a budget that nothing was found for."""
        return BudgetError(
            f"the budget is {budget_bytes} bytes, and AutoSwap does not reach it: the lowest found is "
            f"{self.lowest_bytes} bytes; method 'auto' with recomputation may",
            rule="budget",
        )
