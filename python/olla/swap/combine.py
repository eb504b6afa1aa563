"""Recomputation and swaps combined: each is chosen in turn, given the current choice of the other."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla import _core
from olla.base import Progress, rivals, watched
from olla.errors import BudgetError
from olla.graph import Graph, Rules
from olla.pipeline import find_order
from olla.plan import Options, Plan, Recomputed, Swapped, Swapping, Swaps
from olla.recompute.bounds import refusal
from olla.recompute.search import RecomputeSearch
from olla.swap.bound import SwapBound, working_sets
from olla.swap.choose import plan_swaps
from olla.swap.graph import swapped_graph

_SWAP_WORK = 10_000_000  # for one choice of swaps
_LAST_WORK = 30_000_000  # for the last one
_TURN_WORK = 3_000_000  # for the recomputation, per turn
_SWAP_SHARE = 0.15  # of the time limit, by which a choice of swaps ends at the latest
_TURN_SHARE = 0.06
_NUM_TURNS = 3  # of recomputation and swaps, each given the other
_NUM_REPAIRS = 8  # of the recomputation, per turn
_ALONE_SHARE = 0.4  # of the time limit, for a plan without swaps
_FINAL_SHARE = 0.4  # of the time limit, for ordering and laying out what was chosen
_NUM_TARGETS = 12  # peaks of the recomputation that are tried for a budget
_LEAST_STEP = 0.002  # of the peak, from one to the next
_MOST_STALL = 1.0  # share of the step's time, that ops may wait for copies where recomputation does not help


class _Found(NamedTuple):
    """A choice of recomputation and swaps, on the order in which the rewriter runs the ops.

    Attributes:
        recomputed: the graph that recomputes ops.
        swaps: of the graph's program order.
        absent: int64[n], bytes: what is in host memory at least, at every step of the base order.
        added_seconds: of recomputation and stalls.
    """

    recomputed: Recomputed
    swaps: Swaps
    absent: NDArray[np.int64]
    added_seconds: float


class CombinedSearch:
    """What to recompute, to write in place and to swap in one graph.

    Added time goes to recomputation first, which frees more bytes per second than stalls on copies do; swaps use the
    link meanwhile. Then each is chosen anew in turn, given the other.

    Args:
        graph: the training step.
        rules: what may be done with its ops.
        options: of `olla.plan`; its time limit counts from here on.
        swapping: how tensors may be swapped.
        progress: as in `olla.plan`.

    Attributes:
        recompute: the search for what to recompute.
        lowest_bytes: the lowest peak that was reached towards a budget.
    """

    def __init__(
        self, graph: Graph, rules: Rules, options: Options, swapping: Swapping, progress: Progress | None
    ) -> None:
        self.start = time.perf_counter()
        self.graph, self.options, self.swapping, self.progress = graph, options, swapping, watched(progress)
        self.left_out: list[str] = []
        self.recompute = RecomputeSearch(graph, rules, replace(options, layout=False), self.progress)
        self.base_seconds, self.base_peak_bytes = self.recompute.base_seconds, self.recompute.base_peak_bytes
        self.lowest_bytes = 2**62
        self._has_chosen = False

    def alone(self) -> RecomputeSearch:
        """Return a search without swaps, for part of the time."""
        r, options = self.recompute, replace(self.options, time_limit=_ALONE_SHARE * self.options.time_limit)
        return RecomputeSearch(self.graph, r.rules, options, self.progress, r.base)

    def _left(self) -> float:
        return max(0.0, self.options.time_limit - (time.perf_counter() - self.start))

    def _late(self) -> bool:
        return self._left() < _FINAL_SHARE * self.options.time_limit

    def least(self, added_seconds: float) -> tuple[Recomputed, Swapped]:
        """Find the least peak that adds at most so many seconds."""
        self.recompute.choose(0, added_seconds)
        self.recompute.improve(0, added_seconds)
        best = found = alone = self._with_swaps(added_seconds)
        for turn in range(_NUM_TURNS):
            if self._late():
                break
            with rivals.optional("a turn beside swaps", self.left_out, self.progress) as failed:
                self._beside(found, False, 0, added_seconds, turn)
                found = self._with_swaps(added_seconds)
            if failed:
                break
            if found.swaps.peak_bytes < best.swaps.peak_bytes:
                best = found
        lowest = self._settled(best, added_seconds)
        if best is not alone and lowest[1].swaps.peak_bytes > self.recompute.least_peak_bound(added_seconds):
            return min(lowest, self._settled(alone, added_seconds), key=lambda rewrites: rewrites[1].swaps.peak_bytes)
        return lowest  # there is no lower one without swaps

    def within(self, peak_bytes: int) -> tuple[Recomputed, Swapped] | None:
        """Find the least added time for a peak; None where that is not reached."""
        if not self._has_chosen:
            self.recompute.choose(peak_bytes, math.inf)
        self._has_chosen = True
        found = self._least_time(peak_bytes)
        self.lowest_bytes = min(self.lowest_bytes, found.swaps.peak_bytes)
        return self._settled(found, math.inf, peak_bytes) if found.swaps.peak_bytes <= peak_bytes else None

    def lower(self) -> None:
        """It finds no other plan for about the same time."""

    def last_resorts(self, budget_bytes: int) -> Iterator[tuple[Recomputed, Swapped]]:
        """Recomputation alone has them; see `alone`."""
        return iter(())

    def _least_time(self, limit: int) -> _Found:
        """Recompute as little as swaps allow for a peak within the limit; the lowest peak where that fails."""
        none = np.zeros(0, dtype=np.int32)
        self.recompute.evictor.set_absent(np.zeros(self.graph.num_ops, dtype=np.int64))
        self.recompute.evictor.reset(none, none)
        found = self._with_swaps(0.0, limit)
        for _ in range(_NUM_TARGETS):
            excess = found.swaps.peak_bytes - limit
            if excess <= 0:
                break
            before = self.recompute.evictor.peak
            self.recompute.drop(before - max(excess, int(_LEAST_STEP * before)), math.inf)
            if self.recompute.evictor.peak >= before:
                return self._with_swaps(math.inf, limit)  # recomputation does not help any more
            found = self._with_swaps(0.0, limit)
        best = found
        for turn in range(_NUM_TURNS):
            if self._late() or found.swaps.peak_bytes > limit:
                break
            self._beside(found, True, limit, math.inf, turn)
            found = self._with_swaps(0.0, limit)
            if found.swaps.peak_bytes <= limit and found.added_seconds < best.added_seconds:
                best = found
        return best

    def _beside(self, found: _Found, least_time: bool, limit: int, added: float, turn: int) -> None:
        """Improve the recomputation given the swaps: bytes that they take off the device do not count."""
        evictor = self.recompute.evictor
        evictor.set_absent(found.absent)
        seconds, seed = _TURN_SHARE * self.options.time_limit, self.options.seed + turn
        limits = _core.Limits(time_limit=min(seconds, self._left()), max_work=_TURN_WORK, progress=self.progress)
        target = _core.RecomputeTarget(least_time=least_time, peak=limit, added_seconds=added)
        evictor.improve(target, [], _NUM_REPAIRS, seed, limits)
        evictor.set_absent(np.zeros(self.graph.num_ops, dtype=np.int64))

    def _with_swaps(self, added: float, limit: int | None = None) -> _Found:
        """Choose swaps on top of the current recomputation; stalls may use the rest of the added seconds."""
        r = self.recompute
        recomputed = r.rewritten()
        graph, origin = recomputed.graph, recomputed.origin
        step = np.argsort(r.order).astype(np.int32)
        position = np.where(recomputed.rerun == 0, step[origin], np.int32(self.graph.num_ops))
        position = np.minimum.accumulate(position[::-1])[::-1]  # recomputed ops run before the op they serve
        swaps = self._swaps(recomputed, np.arange(graph.num_ops, dtype=np.int32), added, limit, _SWAP_WORK)
        away, num_bytes = np.zeros(graph.num_ops + 1, dtype=np.int64), graph.tensor_bytes[swaps.tensor]
        np.add.at(away, swaps.freed, num_bytes)
        np.subtract.at(away, swaps.issue, num_bytes)
        least = np.full(self.graph.num_ops, 2**62, dtype=np.int64)
        np.minimum.at(least, position, np.cumsum(away)[:-1])
        again = max(0.0, float(self._seconds(recomputed).sum()) - r.base_seconds)
        return _Found(recomputed, swaps, np.where(least < 2**62, least, 0), again + swaps.stall_seconds)

    def _seconds(self, recomputed: Recomputed) -> NDArray[np.float64]:
        may, origin = self.recompute.rules, recomputed.origin
        return np.where(recomputed.rerun != 0, may.rerun_seconds[origin], may.seconds[origin])

    def _swaps(
        self, recomputed: Recomputed, order: NDArray[np.int32], added: float, limit: int | None, work: int
    ) -> Swaps:
        seconds = self._seconds(recomputed)
        spent = float(seconds.sum())
        left = min(max(0.0, added - (spent - self.recompute.base_seconds)), _MOST_STALL * spent)
        return plan_swaps(
            recomputed.graph,
            order,
            seconds,
            self.swapping.link,
            limit=limit,
            max_slowdown=left / max(spent, 1e-30),
            host_bytes=self.swapping.host_bytes,
            lasting=self._lasting(recomputed.graph),
            time_limit=max(_SWAP_SHARE * self.options.time_limit, 0.02),
            seed=self.options.seed,
            progress=self.progress,
            max_work=work,
        )

    def _lasting(self, graph: Graph) -> NDArray[np.int32]:
        """Return the optimizer state of a graph, the original or a rewritten one, where it may be swapped."""
        state = np.array([kind == "optimizer_state" for kind in graph.tensor_kinds], dtype=np.bool_)
        state &= ~graph.donated & (graph.writer < 0) & self.swapping.state
        state[graph.outputs] = False
        return np.flatnonzero(state).astype(np.int32)

    def _settled(self, found: _Found, added: float, limit: int | None = None) -> tuple[Recomputed, Swapped]:
        """Order what was found, choose its swaps again in that order, and take the better of both."""
        recomputed, swaps = found.recomputed, found.swaps
        order = np.arange(recomputed.graph.num_ops, dtype=np.int32)
        ordered = find_order(recomputed.graph, self.recompute.final_options(), self.progress)
        for other in {row.tobytes(): row for row in (order, ordered.order)}.values():
            again = self._swaps(recomputed, other, added, limit, _LAST_WORK)
            if (again.peak_bytes, again.stall_seconds) < (swaps.peak_bytes, swaps.stall_seconds):
                order, swaps = other, again
        return recomputed, swapped_graph(recomputed.graph, order, swaps)

    def final_options(self) -> Options:
        """Return the options by which the graph that was found is laid out; its order says it all."""
        limit = max(self._left(), _SWAP_SHARE * self.options.time_limit)
        return replace(self.options, method="program", precedences=(), updates_may_move=True, time_limit=limit)

    @property
    def details(self) -> tuple[str, ...]:
        """Lines for a reader who wants to know more."""
        return (*self.recompute.details, *self.left_out)

    def bounds(self, plan: Plan, added_seconds: float, most_seconds: float, peak_bytes: int) -> tuple[int, float]:
        """Return what is proved about every other plan; see `RecomputeSearch.bounds`."""
        swapping, lasting = self.swapping, self._lasting(self.graph)
        bound = SwapBound(self.graph, self.recompute.rules, swapping.link, swapping.host_bytes, lasting)
        return bound.of(plan, added_seconds, most_seconds, peak_bytes)

    def refused(self, budget_bytes: int) -> BudgetError:
        """Return the error for a budget that nothing was found for."""
        needs = working_sets(self.graph, self.recompute.rules, self._lasting(self.graph))
        largest = np.argsort(-needs, kind="stable")[:3].astype(np.int32)
        return refusal(self.graph, budget_bytes, self.lowest_bytes, largest, needs[largest], "a faster link")
