"""Run-time statistics of a step, and its report: calls, arena, goal, swaps."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from olla.base.process import ProcessPeak
from olla.graph import Graph
from olla.layout import rounded_up
from olla.picture.blocks import blocks_of
from olla.picture.requests import PlacedRequests, requested_blocks
from olla.picture.scene import Scene, amount, changes, peak_bytes, program_order
from olla.plan import Plan
from olla.plan.texts import op_text
from olla.pytorch.memory.arrange import Arranged, with_rounded_sizes
from olla.pytorch.memory.replay import Counters, Miss
from olla.pytorch.planned import PlannedStep
from olla.pytorch.planner import Planner
from olla.report.step import BudgetReport, StepReport, SwapReport

_NUM_MISSES = 5  # named in the report
_NUM_SLOWEST = 5  # the same
_NUM_TIMES = 100  # latest calls whose median is reported


@dataclass
class Seen:
    """What happened in the arena since the step was recorded."""

    num_steps: int = 0
    peak_bytes: int = 0  # in the arena, of what outlives the step, and missed
    num_misses: int = 0
    missed_bytes: int = 0
    misses: tuple[Miss, ...] = ()

    def add(self, step: Counters) -> None:
        self.num_steps += 1
        self.peak_bytes = max(self.peak_bytes, step.total_peak_bytes + step.missed_bytes)
        self.num_misses += step.num_misses
        self.missed_bytes += step.missed_bytes
        self.misses = (*self.misses, *step.misses)[:_NUM_MISSES]


@dataclass
class Figures:
    """Times, peaks and counters of a step, for its report.

    Attributes:
        capture_seconds, plan_seconds, record_seconds: of the preparations.
        eager_peak_bytes: peak of the program order of the captured step, sizes rounded up as in the arena.
        is_cached: whether the plan came from the disk.
        notes: for a person; empty ones are left out.
        num_steps: calls that came to their end.
        seen: what happened in the arena since the step was recorded.
        process: its memory until the step was planned, and since.
    """

    capture_seconds: float
    plan_seconds: float
    eager_peak_bytes: int
    is_cached: bool
    notes: list[str]
    record_seconds: float = 0.0
    num_steps: int = 0
    held_gradient_bytes: int = 0  # in .grad when the latest call began
    seen: Seen = field(default_factory=Seen)
    process: ProcessPeak = field(default_factory=ProcessPeak)
    _times: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=_NUM_TIMES))

    def add_preparation(self, record_seconds: float, plan_seconds: float) -> None:
        """Add the times of a recorded call and of the layout after it, and reset the statistics of the arena."""
        self.record_seconds += record_seconds
        self.plan_seconds += plan_seconds
        self.process.begin()
        self.seen = Seen()

    def add_time(self, seconds: float) -> None:
        """Add the time of a call, except that of the first one, in which libraries fill their caches."""
        if self.num_steps > 0:
            self._times.append(seconds)

    def report(
        self,
        planned: PlannedStep,
        arranged: Arranged | None,
        planner: Planner | None,
        num_captures: int,
        kept_bytes: int = 0,
    ) -> StepReport:
        """Return the report; `num_captures` is of the step that the user has, `kept_bytes` of the process's arenas."""
        graph, plan, copies, seen = planned.graph, planned.plan, planned.copies, self.seen
        resident = graph.resident_bytes
        stall = copies.stall_seconds if copies else None
        host_budget = planner.swapping.host_bytes if planner and planner.swapping else None
        return StepReport(
            name=graph.name,
            num_ops=graph.num_ops,
            num_steps=self.num_steps,
            num_captures=num_captures,
            in_arena=arranged is not None,
            planned_peak_bytes=resident + arranged.peak_bytes if arranged else plan.peak_bytes,
            measured_peak_bytes=resident + seen.peak_bytes if arranged and seen.num_steps else None,
            eager_peak_bytes=self.eager_peak_bytes if arranged else plan.program_peak_bytes,
            resident_bytes=resident,
            held_gradient_bytes=self.held_gradient_bytes,
            output_bytes=arranged.output_bytes if arranged else 0,
            arena_bytes=arranged.table.arena_bytes if arranged else 0,
            kept_bytes=kept_bytes,
            process_peak_before_bytes=self.process.before_bytes,
            process_peak_bytes=self.process.since_bytes,
            num_misses=seen.num_misses,
            missed_bytes=seen.missed_bytes,
            misses=tuple(
                f"missed: {m.num_bytes} bytes, request {m.index} of {op}: {m.reason}"
                for m in seen.misses
                for op in [op_text(plan, m.op, graph.op_names[m.op])]
            ),
            seconds_per_step=statistics.median(self._times) if self._times else None,
            capture_seconds=self.capture_seconds,
            plan_seconds=self.plan_seconds,
            record_seconds=self.record_seconds,
            slowest=_slowest(graph),
            cached=self.is_cached,
            note=" ".join(note for note in self.notes if note),
            budget=budget_report(plan, planner.goal.budget_bytes if planner else None, graph.seconds, stall),
            swap=swap_report(plan, copies.host_bytes if copies else 0, host_budget, stall),
        )


def _slowest(graph: Graph) -> tuple[tuple[str, float], ...]:
    """Return the names of the slowest ops of a graph, with their seconds."""
    slowest = np.argsort(-graph.seconds, kind="stable")[:_NUM_SLOWEST]
    return tuple((graph.op_names[v], float(graph.seconds[v])) for v in slowest if graph.seconds[v] > 0)


def added_seconds(seconds: NDArray[np.float64], found: Plan) -> float:
    """Return the time of recomputation: of all runs of an op beyond one.

    Args:
        seconds: float64[n], of each op of the last graph.
        found: the plan, which says which of them are recomputed.
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
    mean = runs / np.maximum(num_runs - own_runs, 1)
    return float(np.where(own_runs > 0, runs, runs - mean).sum())


def budget_report(
    found: Plan, budget_bytes: int | None, seconds: NDArray[np.float64], stall_seconds: float | None
) -> BudgetReport | None:
    """Return the effect of a goal on a step; None where nothing was rewritten.

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


def step_scene(planned: PlannedStep, arranged: Arranged | None, report: StepReport) -> Scene:
    """Return what the page of a step shows: what was captured beside what runs, and the arena with every request.

    Args:
        planned: the step.
        arranged: its arena; None: there is none.
        report: its figures.
    """
    graph, plan, given = planned.graph, planned.plan, planned.given()
    before, after = blocks_of(given, program_order(given)), blocks_of(graph, plan.order)
    if arranged is not None:
        before = blocks_of(with_rounded_sizes(given, planned.alignment), program_order(given))
        arena_bytes, op_offset, num_bytes, offsets, alignment = arranged.table
        freed = arranged.freed_in, arranged.freed_after
        taken = rounded_up(num_bytes, alignment)
        after = requested_blocks(
            graph, plan.order, PlacedRequests(op_offset, num_bytes, taken, offsets, *freed, arena_bytes)
        )
    amounts = {
        "program order": peak_bytes(before, given.num_ops),
        "as planned": peak_bytes(after, graph.num_ops),
        "measured": report.measured_peak_bytes,
        "resident": graph.resident_bytes,
        "outputs": report.output_bytes,
        "arena": report.arena_bytes,
    }
    figures = [(name, "not measured" if n is None else amount(n)) for name, n in amounts.items()]
    return Scene(
        title=f"{given.name or 'a training step'}: compiled step",
        figures=[*figures, ("ops", f"{given.num_ops:,} captured, {graph.num_ops:,} run"), *changes(plan)],
        given=given,
        planned=graph,
        plan=plan,
        before=before,
        after=after,
        arena_bytes=report.arena_bytes,
        no_arena=f"The step runs in planned order on torch's own allocator, in no arena. {report.note}".strip(),
    )
