"""AutoSwap: blocks idle across the peak, by one of four scores, until the peak fits.

Source: Zhang et al., Efficient memory management for GPU-based deep learning systems (arXiv 1903.06631), section 4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.errors import BudgetError
from olla.graph import Graph, Rules
from olla.plan import Link, Options, Plan, Swapped, Swapping, Swaps
from olla.plan.swaps import PCIE3
from olla.swap.bound import SwapBound
from olla.swap.graph import swapped_graph
from olla.swap.search import SwapSearch

SCORES = ("DOA", "AOA", "WDOA", "SWDOA")
_MIN_BYTES = 1_000_000
_CHOICE_SHARE = 0.6  # of the time limit, where AutoSwap is all there is
_NUM_LIMITS = 32  # tried, from the peak down, where none is given


class AutoSwap:
    """AutoSwap for one order.

    Args:
        graph: the training step.
        order: int32[n], kept.
        seconds: float64[n], of op v.
        link: to host memory; what the paper saw by default.
        host_bytes: host memory there is.
        deadline: by `time.perf_counter`: past it, what was found is the answer.

    Example:
        >>> import olla
        >>> b = olla.Graph.builder("gap")
        >>> x, y, z, w = b.tensor(2000000), b.tensor(2000000), b.tensor(8), b.tensor(8)
        >>> _ = b.op("make", writes=[x], seconds=1.0), b.op("wait", writes=[z], seconds=1.0)
        >>> _ = b.op("large", reads=[z], writes=[y], seconds=1.0)
        >>> _ = b.op("rest", reads=[y], writes=[w], seconds=1.0), b.op("more", reads=[w], seconds=1.0)
        >>> _ = b.op("use", reads=[x], seconds=1.0)
        >>> g = b.build()
        >>> AutoSwap(g, np.arange(6, dtype=np.int32), g.seconds).least_peak("SWDOA").peak_bytes
        2000008
    """

    def __init__(
        self,
        graph: Graph,
        order: NDArray[np.int32],
        seconds: NDArray[np.float64],
        link: Link = PCIE3,
        host_bytes: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.search = SwapSearch(
            graph, order, seconds, link, host_bytes=host_bytes, min_bytes=_MIN_BYTES, early_copies=False
        )
        self.host_bytes = math.inf if host_bytes is None else host_bytes
        self.deadline = deadline
        b, live = self.search.blocks, self.search.live
        peak_step = int(np.argmax(live)) if len(live) else 0
        self.candidates = np.flatnonzero((b.last < peak_step) & (peak_step < b.next))
        self.peak_bytes = int(live.max(initial=graph.resident_bytes))
        self.begin = np.concatenate([[0.0], np.cumsum(self.search.seconds)])
        self.out_seconds = self.search.num_bytes / link.out_bytes_per_second + link.out_latency_seconds
        self.in_seconds = self.search.num_bytes / link.in_bytes_per_second + link.in_latency_seconds
        # Steps between which a block is away, if all copies ran at once.
        self.gone = np.searchsorted(self.begin, self.begin[b.last + 1] + self.out_seconds)
        self.back = np.searchsorted(self.begin, self.begin[b.next] - self.in_seconds, side="right") - 1

    def score(self, name: str, blocks: NDArray[np.int64], load: NDArray[np.int64], limit: int) -> NDArray[np.float64]:
        """Return the score of blocks.

        Args:
            name: one of SCORES; WDOA and SWDOA differ in the load that they are asked for.
            blocks: int64[m], ids of blocks.
            load: int64[n], bytes live at step s.
            limit: bytes.

        Returns:
            float64[m], higher is better.
        """
        b = self.search.blocks
        last, after = b.last[blocks], b.next[blocks]
        if name in ("WDOA", "SWDOA"):
            area = np.concatenate([[0.0], np.cumsum((load - limit) * self.search.seconds)])
            return np.asarray(area[after] - area[last + 1])
        absence = self.begin[after] - self.begin[last + 1] - self.out_seconds[blocks] - self.in_seconds[blocks]
        if name == "DOA":
            return np.asarray(absence)
        num_bytes = self.search.num_bytes[blocks]
        return np.asarray(np.where(absence >= 0, absence * num_bytes, absence / num_bytes))

    def select(self, name: str, limit: int) -> NDArray[np.int32]:
        """Return blocks in the order of their score until, if all copies ran at once, the peak would fit the limit."""
        num_bytes, load = self.search.num_bytes, self.search.live.copy()
        left, chosen = self.candidates, list[int]()
        scores = self.score(name, left, load, limit)
        ranked = iter(left[np.argsort(-scores, kind="stable")].tolist())
        while len(chosen) < len(self.candidates) and load.max() > limit and not self._late():
            if name == "SWDOA":  # by the load that remains
                best = int(np.argmax(self.score(name, left, load, limit)))
                i, left = int(left[best]), np.delete(left, best)
            else:
                i = next(ranked)
            chosen.append(i)
            if self.gone[i] < self.back[i]:
                load[self.gone[i] : self.back[i]] -= num_bytes[i]
        return np.array(chosen, dtype=np.int32)

    def least_peak(self, name: str, max_slowdown: float = 0.0) -> Swaps:
        """Return the least peak at no overhead, or within a share of the ops' time, over limits from the peak down."""
        most_stall = max_slowdown * self.search.base_seconds + 1e-9
        best = self.search.evaluate(np.zeros(0, dtype=np.int32))
        for limit in np.linspace(self.peak_bytes, 0, _NUM_LIMITS, endpoint=False).astype(np.int64).tolist():
            if self._late():
                break
            blocks = self.select(name, limit)
            trials = [self.search.evaluate(blocks)]
            if max_slowdown > 0.0:
                trials.append(self.search.evaluate(blocks, limit))
            for swaps in trials:
                allowed = swaps.stall_seconds <= most_stall and swaps.host_bytes <= self.host_bytes
                if allowed and swaps.peak_bytes < best.peak_bytes:
                    best = swaps
        return best

    def _late(self) -> bool:
        return time.perf_counter() >= self.deadline


class AutoSwapSearch:
    """AutoSwap on its own: what it copies to host memory, on the program order or on the one in the options.

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
        deadline = time.perf_counter() + _CHOICE_SHARE * options.time_limit
        self.method = AutoSwap(graph, self.order, rules.seconds, swapping.link, swapping.host_bytes, deadline)
        self.lowest_bytes = 2**62

    def least(self, added_seconds: float) -> tuple[Swapped]:
        """Find the least peak for which ops wait at most so many seconds."""
        slowdown = added_seconds / self.base_seconds if self.base_seconds > 0 else 0.0
        found = (self.method.least_peak(score, slowdown) for score in SCORES)
        return self._swapped(min(found, key=lambda swaps: swaps.peak_bytes))

    def within(self, peak_bytes: int) -> tuple[Swapped] | None:
        """Find the least stall for a peak; None where that is not reached."""
        method = self.method  # the peak is above the limit where its blocks do not suffice
        found = [method.search.evaluate(method.select(score, peak_bytes), peak_bytes) for score in SCORES]
        self.lowest_bytes = min(self.lowest_bytes, *(swaps.peak_bytes for swaps in found))
        fitting = [s for s in found if s.peak_bytes <= peak_bytes and s.host_bytes <= method.host_bytes]
        return self._swapped(min(fitting, key=lambda swaps: swaps.stall_seconds)) if fitting else None

    def _swapped(self, swaps: Swaps) -> tuple[Swapped]:
        return (swapped_graph(self.graph, self.order, swaps),)

    def lower(self) -> None:
        """It finds no other plan for about the same time."""

    def last_resorts(self, budget_bytes: int) -> Iterator[tuple[Swapped]]:
        """There is none."""
        return iter(())

    def final_options(self) -> Options:
        """Return the options by which the graph that was found is laid out; its order says it all."""
        return replace(self.options, method="program", precedences=(), updates_may_move=True)

    def bounds(self, plan: Plan, added_seconds: float, most_seconds: float, peak_bytes: int) -> tuple[int, float]:
        """Return what is proved about every other plan that keeps what ops make; see `RecomputeSearch.bounds`."""
        bound = SwapBound(self.graph, self.rules, self.swapping.link, self.swapping.host_bytes)
        return bound.of(plan, added_seconds, most_seconds, peak_bytes)

    def refused(self, budget_bytes: int) -> BudgetError:
        """Return the error for a budget that nothing was found for."""
        return BudgetError(
            f"the budget is {budget_bytes} bytes, and AutoSwap does not reach it: the lowest found is "
            f"{self.lowest_bytes} bytes; method 'auto' with recomputation may",
            rule="budget",
        )
