"""Choose what forward saves and what backward recomputes, by the estimated peak of the fused code."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olla._core import CoreRecomputeSearch, Limits, Runs, Values
from olla.inductor.saving.joint import Joint
from olla.inductor.saving.kinds import Fusion
from olla.inductor.saving.offload import Offload, offloaded
from olla.plan import Goal, Swapping

_UNLIMITED = 1e30
_SEED_SECONDS = 1.0  # of one minimum cut; a guard, it takes a thousandth
_RUN_SECONDS = 10.0  # of one greedy, the same
_NO_LIMIT = 1e9  # seconds
_ROUNDING = 1 + 1e-12  # of a share that was a quotient of flops
_RUN_WORK = 800_000  # of the greedy from one start, in simulated op runs; only the lowest of them gets the next
_LAST_WORK = 8_000_000
_NUM_BOUNDS = 16  # kernels at which the lower bound is sought
_SMALL_SHARES = (0.00125, 0.0025, 0.005, 0.01, 0.02)  # of a step's flops: products that a limit leaves room for
_LARGE_SHARE = 0.2  # of the bytes at the peak: a tensor of more is taken from the device for itself
_NUM_COPIED = 24  # plans of the front for which offloading is tried; 48 are no better (ablate_offload.py)
_NO_MATTER = 1.001  # times the least peak: accepted in exchange for less time
_MOST_STALL = 1.0  # share of a step's time that it may wait for copies, if the goal sets no limit
_BOUND_SECONDS = 2.0  # a guard again; a bound that is not found by then is left out
# Prices of time for the cuts the greedy starts from, as multiples of (bytes all saved) / (seconds of the step).
_PRICES = 2.0 ** np.arange(-4, 13)
_PRICE_STEPS = (1, 2, 2)  # of each search for cuts: how many of the prices it takes


class Again(NamedTuple):
    """Limits on recomputed matrix products, convolutions and attention.

    Attributes:
        flops: as a share of all flops of these.
        seconds: estimated, as a share of the step's.
    """

    flops: float = math.inf
    seconds: float = math.inf

    def allows(self, joint: Joint, evictor: CoreRecomputeSearch) -> bool:
        """Return whether the search's current plan is within these limits."""
        op, product_seconds = evictor.runs().op, np.where(joint.flops > 0, joint.seconds, 0.0)
        most_flops, most_seconds = _most(self.flops, joint.flops.sum()), _most(self.seconds, joint.step_seconds)
        return _again(joint.flops, op) <= most_flops and _again(product_seconds, op) <= most_seconds


EVERYTHING = Again()


def _most(share: float, total: float) -> float:
    return share * _ROUNDING * float(total) if total else 0.0  # infinity times nothing is no number


def _again(amounts: NDArray[Any], op: NDArray[np.int32]) -> float:
    """Return the amount (flops or seconds) that a plan recomputes: the sum over its runs less one run per op."""
    return (amounts[op].sum() - amounts.sum()).item()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SavedChoice:
    """What was chosen, as the planner sees it.

    Attributes:
        peak_bytes: most memory live at once in forward and backward, with inputs and gradients.
        added_seconds: estimated, of recomputation beyond the user's own checkpoints; less the time of boolean tensors
            that are no longer stored.
        step_seconds: estimated, of forward and backward with everything saved.
        values, runs: of the core's RecomputeSearch: what runs, in order.
        recomputed_flops: of matrix products, convolutions and attention that are recomputed.
        saved_peak_bytes: the peak with everything saved.
        lower_bound_bytes: no plan whose recomputed kernels take at most as long as this one's has a lower peak, by the
            same model of fusion, whatever its order within forward and within backward.
        segment_bytes: live at the peak, without inputs and the largest tensors; see `segment_bytes`.
        code_peak_bytes: the peak of the code that Inductor generates for it; None if that was not simulated.
        offload: tensors offloaded between forward and backward; None: none. The peak excludes them, and the added
            seconds include stalls on copies.
    """

    peak_bytes: int
    added_seconds: float
    step_seconds: float
    values: Values
    runs: Runs
    recomputed_flops: int
    saved_peak_bytes: int
    lower_bound_bytes: int
    segment_bytes: int
    code_peak_bytes: int | None = None
    offload: Offload | None = None

    @property
    def slowdown(self) -> float:
        """Added seconds as a share of the step's."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def known_peak_bytes(self) -> int:
        """The peak of the generated code if that is known, else the planned peak."""
        return self.peak_bytes if self.code_peak_bytes is None else self.code_peak_bytes


@dataclass(frozen=True)
class _Point:
    """A plan on a curve of the greedy: its peak, its added seconds, and the drops that produce it."""

    peak: int
    added: float
    values: NDArray[np.int32]
    steps: NDArray[np.int32]


class Front:
    """All plans that the greedy found from its starts, computed once; each goal picks from them.

    The candidates depend on the kind of goal alone; if none fits a budget, more are added. So without offloading a
    smaller budget never yields a higher peak, and a larger slowdown never needs more memory. Offloading is searched for
    each budget by itself, and never makes a plan worse.

    Args:
        joint: what is planned.
        again: limits on recomputed matrix products, convolutions and attention.
        host: where tensors may be offloaded; None: nowhere.

    Complexity:
        A few thousand simulations, each O(nodes + edges).
    """

    def __init__(self, joint: Joint, again: Again = EVERYTHING, host: Swapping | None = None) -> None:
        self.joint = joint.without_products() if again.flops == 0 else joint
        self.again, self.host = again, host
        self.evictor = self.joint.evictor()

    @functools.cached_property
    def _usual(self) -> list[_Point]:
        points = _points(self.joint, self.evictor)
        if 0 < self.again.flops < math.inf:
            points += _small_products(self.joint, self.again.flops)
        return points

    @functools.cached_property
    def _more(self) -> list[_Point]:
        """Plans found without the extra cost of random numbers and boolean tensors, for goals where time is free."""
        by_traffic = self.joint.by_traffic()
        return _points(by_traffic, by_traffic.evictor()) if by_traffic is not self.joint else []

    def choose(self, goal: Goal, *, copies: bool = True) -> SavedChoice:
        """Return the best plan for a goal, with or without offloading; if none fits a budget, the one of least peak."""
        points = self._usual
        fits = goal.budget_bytes is None or any(point.peak <= goal.budget_bytes for point in points)
        if goal.minimise or not fits:
            points = points + self._more
        best = _pick(points, self.joint, self.evictor, goal, self.again)
        _clear(best, points, self.joint, self.evictor, self.again)
        alone = self._choice(None)
        return alone if self.host is None or not copies else self._beside_copies(points, alone, goal)

    def _choice(self, offload: Offload | None) -> SavedChoice:
        """Return the search's current plan, with the given tensors offloaded."""
        runs, first = self.evictor.runs(), self._usual[0]
        stall = 0.0 if offload is None else offload.stall_seconds
        return SavedChoice(
            peak_bytes=self.evictor.peak if offload is None else offload.peak_bytes,
            added_seconds=self.evictor.added_seconds - first.added + stall,
            step_seconds=self.joint.step_seconds,
            values=self.evictor.values,
            runs=runs,
            recomputed_flops=int(_again(self.joint.flops, runs.op)),
            saved_peak_bytes=first.peak,
            lower_bound_bytes=self.joint.graph.resident_bytes if offload else _lower_bound(self.joint, runs),
            segment_bytes=segment_bytes(self.joint, self.evictor.values, runs, offload),
            offload=offload,
        )

    def _beside_copies(self, points: list[_Point], alone: SavedChoice, goal: Goal) -> SavedChoice:
        """Return the best plan for a goal with offloading allowed; `alone` is the best without."""
        budget = goal.budget_bytes or 0
        slowdown = _MOST_STALL if goal.max_slowdown is None else goal.max_slowdown
        most = slowdown * self.joint.step_seconds
        found = self._with_copies(points, alone, budget, most)
        if found.peak_bytes <= budget or goal.max_slowdown is not None:
            return found
        least = self._with_copies(points, found, 0, most) if budget else found
        return self._with_copies(points, least, int(least.peak_bytes * _NO_MATTER), most)

    def _with_copies(self, points: list[_Point], best: SavedChoice, budget: int, most_seconds: float) -> SavedChoice:
        """Return a plan with offloading that beats `best` for a budget (0: for the least peak), else `best`.

        Recomputation and offloading are chosen together: offloads are chosen for plans all along the front, and the
        plan that adds least time, or has the lowest peak, is taken.
        """
        assert self.host is not None

        def rank(choice: SavedChoice) -> tuple[float, float]:
            return max(choice.peak_bytes, budget), choice.added_seconds

        for point in _spread(points, budget):
            added = point.added - self._usual[0].added
            enough = best.added_seconds if best.peak_bytes <= budget else most_seconds
            self.evictor.reset(point.values, point.steps)
            if added >= enough or not self.again.allows(self.joint, self.evictor):
                continue
            values, runs = self.evictor.values, self.evictor.runs()
            found = offloaded(self.joint, values, runs, self.host, budget, enough - max(added, 0.0))
            if found is not None:
                best = min(best, self._choice(found), key=rank)
        return best


def choose(joint: Joint, goal: Goal, again: Again = EVERYTHING) -> SavedChoice:
    """Return the best plan for a goal, without copies to host memory; see `Front`."""
    return Front(joint, again).choose(goal)


def _spread(points: list[_Point], budget: int) -> list[_Point]:
    """Return Pareto-optimal plans with peaks above a budget: at most `_NUM_COPIED`, more of them close to it."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.added, p.peak)):
        if point.peak > budget and (not front or point.peak < front[-1].peak):
            front.append(point)
    if len(front) <= _NUM_COPIED:
        return front
    above = np.array([p.peak - budget for p in front])
    wanted = np.geomspace(above[-1], above[0], _NUM_COPIED)
    return [front[i] for i in sorted({int(np.abs(above - more).argmin()) for more in wanted.tolist()})]


def segment_bytes(joint: Joint, values: Values, runs: Runs, offload: Offload | None = None) -> int:
    """Return the bytes alive at the peak, without inputs and without tensors of a fifth of that or more.

    It is what an allocator should take from a device in one piece: the largest tensors fit better into pieces of
    their own, which they take over from each other.
    """
    num_copies = len(runs.value)
    gone, back = np.zeros((2, num_copies), dtype=np.int32)
    if offload is not None:
        gone[offload.copy], back[offload.copy] = offload.freed, offload.issue
    sizes = joint.graph.tensor_bytes[values.tensor[runs.value]]
    absent = np.zeros(len(runs.op) + 1, dtype=np.int64)
    np.add.at(absent, gone, sizes)
    np.add.at(absent, back, -sizes)
    live = runs.live_bytes - np.cumsum(absent)[:-1]
    peak = int(live.argmax())
    num_bytes = int(live[peak]) - joint.graph.resident_bytes
    made, read = np.full(num_copies, len(runs.op)), np.full(num_copies, -1)
    for at, (offset, copies) in ((made, runs.makes), (read, runs.reads)):
        at[copies] = np.repeat(np.arange(len(runs.op)), np.diff(offset))  # of reads the last one stays
    alive = (made <= peak) & (peak <= read) & (runs.fused == 0) & ~((gone <= peak) & (peak < back))
    large = sizes[alive & (sizes > _LARGE_SHARE * num_bytes)]
    return max(num_bytes - int(large.sum()), 0)


def _small_products(joint: Joint, max_recomputed: float) -> list[_Point]:
    """Return plans that recompute no product, and extensions of the lowest one by small products alone.

    A greedy that may recompute any product soon takes a large one, beyond a low limit. The sizes tried are fixed, and a
    higher limit tries all sizes of a lower one: so more flops never need more memory.
    """
    free = joint.without_products()
    points = _points(free, free.evictor())
    lowest = min(points, key=lambda p: (p.peak, p.added))
    for most in _SMALL_SHARES:
        if most <= max_recomputed:
            evictor = joint.without_products(most).evictor()
            evictor.reset(lowest.values, lowest.steps)
            points += _curve(evictor, _LAST_WORK, _guard(joint, _RUN_SECONDS))
    return points


def _lower_bound(joint: Joint, runs: Runs) -> int:
    """Return the best of the lower bounds at the kernels where a plan has most memory live."""
    bounding, seconds = joint.bounding()
    added = float(seconds[runs.op].sum() - seconds.sum())
    kernel = (joint.fusion[runs.op] == Fusion.KERNEL) & (runs.again == 0)
    highest = np.argsort(-np.where(kernel, runs.live_bytes, 0), kind="stable")[:_NUM_BOUNDS]
    ops = runs.op[highest[kernel[highest]]]
    if not len(ops):
        return joint.graph.resident_bytes
    bounds, _ = bounding.least_peak(ops, max(added, 0.0), _BOUND_SECONDS, None)
    return max(int(bounds.max()), joint.graph.resident_bytes)


def _pick(points: list[_Point], joint: Joint, evictor: CoreRecomputeSearch, goal: Goal, again: Again) -> _Point:
    """Return the first plan, in the goal's order of preference, that is within the limits on recomputation."""
    by_peak = sorted(points, key=lambda p: (p.peak, p.added))
    order = by_peak
    if goal.max_slowdown is not None:
        limit = points[0].added + goal.max_slowdown * joint.step_seconds  # beyond the user's own checkpoints
        order = [p for p in by_peak if p.added <= limit]
    elif goal.budget_bytes is not None:
        fitting = sorted((p for p in points if p.peak <= goal.budget_bytes), key=lambda p: (p.added, p.peak))
        order = [*fitting, *by_peak]
    for point in order:
        evictor.reset(point.values, point.steps)
        if again.allows(joint, evictor):
            return point
    return points[0]


def _clear(best: _Point, points: list[_Point], joint: Joint, evictor: CoreRecomputeSearch, again: Again) -> None:
    """Make a plan the current one, without those drops of its start that do not lower its peak.

    This may lower the peak, though not below that of the plan for the next lower budget.
    """
    lower = min((p for p in points if p.peak < best.peak), key=lambda p: (p.added, p.peak), default=None)
    evictor.reset(best.values, best.steps)
    evictor.reverse(best.peak, lower.peak if lower else 0, _guard(joint, _RUN_SECONDS), _LAST_WORK)
    if not again.allows(joint, evictor):
        evictor.reset(best.values, best.steps)


def _points(joint: Joint, evictor: CoreRecomputeSearch) -> list[_Point]:
    """Return the plans on the greedy's curves from every start: forward's values kept, minimum cuts.

    The first plan saves all values of forward; ops that only backward needs run in backward.
    """
    starts = [_made_late(joint, evictor)]
    seed_seconds, run_seconds = _guard(joint, _SEED_SECONDS), _guard(joint, _RUN_SECONDS)
    scale = evictor.peak / joint.step_seconds
    for cuts, step in zip(joint.starting(), _PRICE_STEPS, strict=False):
        starts += [cuts.made_again(joint.split, price, seed_seconds) for price in (_PRICES[::step] * scale).tolist()]
    points: list[_Point] = []
    for start in {tuple(start.tolist()): start for start in starts}.values():
        last = np.full(len(start), joint.split - 1, dtype=np.int32)
        if evictor.reset(start, last):
            points += _curve(evictor, _RUN_WORK, run_seconds)
    lowest = min(points, key=lambda p: (p.peak, p.added))
    evictor.reset(lowest.values, lowest.steps)
    return points + _curve(evictor, _LAST_WORK, run_seconds)


def _guard(joint: Joint, seconds: float) -> float:
    """Return a time limit; none if ranks communicate, since a slow rank must choose as the others do."""
    return _NO_LIMIT if joint.communicates else seconds


def _curve(evictor: CoreRecomputeSearch, max_work: int, seconds: float) -> list[_Point]:
    """Run the greedy from the current drops; return the plans along its way."""
    evictor.run(0, _UNLIMITED, Limits(time_limit=seconds, max_work=max_work, progress=None))
    curve, decisions = evictor.curve(), evictor.decisions()
    values, steps = decisions.values, decisions.steps
    ends = decisions.offset[curve.num_decisions].tolist()
    return [
        _Point(peak, added, values[:end], steps[:end])
        for peak, added, end in zip(curve.peak_bytes.tolist(), curve.added_seconds.tolist(), ends, strict=True)
    ]


def _made_late(joint: Joint, evictor: CoreRecomputeSearch) -> NDArray[np.int32]:
    """Return the values that forward could compute but does not need: starts leave them to backward, unsaved."""
    offset, made = evictor.values.makes
    return np.concatenate([made[:0], *(made[offset[op] : offset[op + 1]] for op in joint.late)])
