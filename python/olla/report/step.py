"""Report of a compiled step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from olla.base import cells, figures, human_bytes, notebook, percent, plain

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class BudgetReport:
    """What a budget made of a compiled step.

    Attributes:
        budget_bytes: what resident memory, outputs and the arena must fit; None where the goal was another one.
        unbudgeted_peak_bytes: of the best order found without rewriting; without workspaces of kernels, unless the
            step was planned again with them.
        peak_lower_bound_bytes: no rewriting that the goal allows has a lower peak, in any order, workspaces of
            kernels left out likewise.
        num_recomputed: runs beyond one per op.
        num_in_place: results that take over an input's storage.
        planned_slowdown: estimated added time as a share of the step's own.
        measured_slowdown: the same by the seconds of the recorded call; None where none was recorded.
        measured_added_seconds: time of the runs beyond one per op in that call.
        num_chunked_losses: losses that run in chunks of rows, with other rounding.
    """

    budget_bytes: int | None
    unbudgeted_peak_bytes: int
    peak_lower_bound_bytes: int
    num_recomputed: int
    num_in_place: int
    planned_slowdown: float
    measured_slowdown: float | None
    measured_added_seconds: float | None
    num_chunked_losses: int = 0


@dataclass(frozen=True, kw_only=True)
class SwapReport:
    """What a compiled step copies to host memory and back.

    Attributes:
        num_swaps: copies out in one step; as many come back.
        swapped_bytes: copied out in one step.
        host_bytes: of host memory that the copies take, gaps between them included.
        host_budget_bytes: what they may take; None: as many as needed.
        planned_stall_seconds: that ops wait for copies, by the timeline.
        measured_stall_seconds: that they waited in the latest step; None on a GPU, or before the first step.
    """

    num_swaps: int
    swapped_bytes: int
    host_bytes: int
    host_budget_bytes: int | None
    planned_stall_seconds: float
    measured_stall_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Memory and time of a compiled step, for the batch shapes it ran with last.

    Attributes:
        name: of the captured graph.
        num_ops: operators of the step.
        num_steps: calls with these shapes so far.
        num_ordinary_steps: calls that ran as the ordinary step, since it could not be captured; of all shapes.
        num_captures: captures in the step's cache.
        in_arena: whether the step runs at planned addresses; else in planned order on torch's own allocator.
        planned_peak_bytes: resident memory, and the most bytes of arena and outputs in use at once by plan: an output
            counts from when it is made. Where the step does not run in an arena: the peak of the plan, which knows no
            workspaces of kernels unless they were recorded.
        measured_peak_bytes: the same as it was: resident memory, the most bytes of arena and outputs that were in use
            at once, and all missed bytes; None where nothing was measured.
        eager_peak_bytes: computed, not measured: the peak of the captured operators in program order, none recomputed
            or in chunks, by the same rules: with outputs from when they are made, and recorded workspaces where the
            plan has them. An ordinary loop that clears its gradients before the forward pass and updates one parameter
            at a time (``foreach=False``) comes close to it.
        resident_bytes: parameters, buffers, optimizer state and batch: live throughout.
        held_gradient_bytes: of gradients that were in ``.grad`` when the latest call began, and which the step's own
            were added to: on top of all peaks. A step without an optimizer gives its gradients when it ends; an
            ordinary loop adds each to ``.grad`` as it is made.
        output_bytes: what the step gives back, from torch's own allocator.
        arena_bytes: size of the arena; 0 where there is none.
        kept_bytes: of arenas that stay taken between calls, of all steps and pools of the process on this device;
            ``step.release()`` gives them back.
        process_peak_before_bytes: the most that the process had resident until the plan was made, capture and recorded
            call included; None where the system does not say.
        process_peak_bytes: the most since then, all else in the process included (libraries, Python, other steps); None
            where the system cannot count anew: that is for Linux.
        num_misses: requests since these shapes were last recorded that were not answered from the arena as planned.
        missed_bytes: bytes of those requests.
        misses: the first of them, in words.
        seconds_per_step: median wall-clock time of the latest calls, recording left out; on a GPU, kernels may still be
            running when a call returns. None before the second call.
        capture_seconds: tracing the step.
        plan_seconds: ordering its operators and laying out its requests.
        record_seconds: the recorded calls.
        slowest: the slowest ops of the recorded call and their seconds.
        cached: whether capture and plan came from the disk; then they took no time, but for finding and reading them.
        note: what a reader should know besides; empty if nothing.
        budget: what the budget, or swaps, did; None where there are none.
        swap: what is copied to host memory; None where nothing may be.
    """

    name: str
    num_ops: int
    num_steps: int
    num_captures: int
    in_arena: bool
    planned_peak_bytes: int
    measured_peak_bytes: int | None = None
    eager_peak_bytes: int
    resident_bytes: int
    held_gradient_bytes: int = 0
    output_bytes: int = 0
    arena_bytes: int = 0
    kept_bytes: int = 0
    process_peak_before_bytes: int | None = None
    process_peak_bytes: int | None = None
    num_misses: int = 0
    missed_bytes: int = 0
    misses: tuple[str, ...] = ()
    seconds_per_step: float | None
    capture_seconds: float
    plan_seconds: float
    record_seconds: float = 0.0
    slowest: tuple[tuple[str, float], ...] = ()
    cached: bool = False
    note: str
    budget: BudgetReport | None = None
    swap: SwapReport | None = None
    num_ordinary_steps: int = 0

    def __str__(self) -> str:
        """Return the report as the table a person wants."""
        if not self.num_ops and self.num_ordinary_steps:
            return plain(*cells(f"{self.name}: {self.num_ordinary_steps:,} ordinary steps", self.note), width=100)
        title = f"{self.name}: {self.num_ops:,} ops, {self.num_steps:,} steps"
        slowest = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in self.slowest)
        notes = [slowest and f"slowest when recorded: {slowest}", *self.misses, self.note]
        return plain(*cells(title), self._figures(), *cells(*filter(None, notes)), width=100)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        peaks = [("eager peak", self.eager_peak_bytes), ("planned peak", self.planned_peak_bytes)]
        if self.measured_peak_bytes is not None:
            peaks.append(("measured peak", self.measured_peak_bytes))
        seconds = "unknown" if self.seconds_per_step is None else f"{self.seconds_per_step * 1e3:.3f} ms"
        arena = human_bytes(self.arena_bytes) if self.in_arena else "none: planned order, torch's own allocator"
        missed = f"{human_bytes(self.missed_bytes)}, {self.num_misses:,} requests" if self.num_misses else "none"
        rows = [("resident", human_bytes(self.resident_bytes)), ("arena", arena), ("missed", missed)]
        if self.budget is not None:
            recomputed = f"{self.budget.num_recomputed:,} ops, {percent(self.budget.planned_slowdown)} added time"
            rows.append(("recomputed", recomputed))
        title = f"{self.name}: {self.num_ops:,} ops, {self.num_steps:,} steps"
        picture = notebook.bars(peaks, "; ".join(f"{name} {human_bytes(n)}" for name, n in peaks))
        return notebook.shown(title, [*rows, ("time per step", seconds)], picture, [self.note])

    def _figures(self) -> Table:
        table = figures({}, {"justify": "right"}, {"justify": "right"}, {})
        row = partial(_add_bytes, table)
        saved = self.eager_peak_bytes - self.planned_peak_bytes
        row("eager peak", self.eager_peak_bytes, "computed: program order")
        row("planned peak", self.planned_peak_bytes, f"saves {percent(saved / max(1, self.eager_peak_bytes))}")
        row("measured peak", self.measured_peak_bytes, "" if self.in_arena else "planned order, torch's own allocator")
        row("resident", self.resident_bytes, "live throughout, outside the arena")
        if self.held_gradient_bytes:
            row("held gradients", self.held_gradient_bytes, "in .grad before the call, on top of all peaks")
        row("outputs", self.output_bytes, "yours, outside the arena")
        row("arena", self.arena_bytes)
        row("kept between calls", self.kept_bytes, "all arenas of the process; step.release() gives them back")
        row("missed", self.missed_bytes, f"{self.num_misses:,} requests")
        if self.process_peak_bytes is not None:
            before = human_bytes(self.process_peak_before_bytes or 0)
            row("process", self.process_peak_bytes, f"most resident since it was planned; {before} before")
        seconds = "unknown" if self.seconds_per_step is None else f"{self.seconds_per_step * 1e3:.3f} ms"
        table.add_row("time per step", seconds, "", "median")
        stages = f"{self.capture_seconds:.2f} s, {self.plan_seconds:.2f} s, {self.record_seconds:.2f} s"
        found = " (from the disk)" if self.cached else ""
        table.add_row("once", stages, "", f"capture, plan, record{found}")
        if self.budget is not None:
            self._add_budget(table, self.budget)
        if self.swap is not None:
            self._add_swap(table, self.swap)
        return table

    def _add_budget(self, table: Table, budget: BudgetReport) -> None:
        if budget.budget_bytes is not None:
            needed = self.resident_bytes + self.output_bytes + self.arena_bytes
            remark = f"resident, outputs and arena: {needed:,}" if self.in_arena else ""
            _add_bytes(table, "budget", budget.budget_bytes, remark)
        measured = "" if budget.measured_slowdown is None else f"measured {percent(budget.measured_slowdown)}"
        table.add_row("added time", f"planned {percent(budget.planned_slowdown)}", measured, "of the step's own")
        remark = f"{budget.num_in_place:,} results in place"
        if budget.num_chunked_losses:
            remark += f", {budget.num_chunked_losses} losses in chunks"
        table.add_row("recomputed", f"{budget.num_recomputed:,} ops", "", remark)

    @staticmethod
    def _add_swap(table: Table, swap: SwapReport) -> None:
        most = "" if swap.host_budget_bytes is None else f"at most {swap.host_budget_bytes:,}"
        _add_bytes(table, "swapped", swap.swapped_bytes, f"{swap.num_swaps:,} copies")
        _add_bytes(table, "host memory", swap.host_bytes, most)
        measured = swap.measured_stall_seconds
        remark = "" if measured is None else f"measured {measured * 1e3:.3f} ms"
        table.add_row("waits for copies", f"planned {swap.planned_stall_seconds * 1e3:.3f} ms", remark, "")


def _add_bytes(table: Table, name: str, num_bytes: int | None, remark: str = "") -> None:
    found = ("not measured", "") if num_bytes is None else (human_bytes(num_bytes), f"{num_bytes:,}")
    table.add_row(name, *found, remark)
