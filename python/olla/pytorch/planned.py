"""A captured step with its current plan: the graph that runs, its copies to the host, its compiled programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from olla.base import Progress
from olla.errors import PlanError
from olla.graph import Graph
from olla.plan import Costs, Plan
from olla.plan.chunks import Part
from olla.planner import plan
from olla.pytorch.cache import Place
from olla.pytorch.capture import Captured
from olla.pytorch.memory.arrange import Arranged, arrange_known, program_peak
from olla.pytorch.memory.copies import Copies, HostMemory
from olla.pytorch.memory.out_of_memory import Needs, out_of_memory_note
from olla.pytorch.memory.replay import Replay, alignment_of
from olla.pytorch.memory.requests import Recorder
from olla.pytorch.planner import Planner, captured_costs
from olla.pytorch.program.program import Program, compile_program
from olla.pytorch.program.schedule import OpSchedule, op_schedule
from olla.pytorch.ranks.agreement import Agreement, plan_together
from olla.pytorch.ranks.group import Ranks


class PlannedStep:
    """A captured step with the plan that is in force, ready to be compiled.

    Args:
        captured: the step.
        plan: of the captured graph, or of a rewriting of it.
        host: memory for what is swapped; None: new memory.

    Attributes:
        device: type of the device that it runs on.
        alignment: of the device's memory, in bytes.
        plan: the plan in force.
        estimated: the graph that runs, without what was recorded.
        graph: the same; with workspaces and seconds once it was recorded.
        copies: beside its ops, where the plan swaps.
    """

    def __init__(self, captured: Captured, plan: Plan, host: HostMemory | None) -> None:
        self.device = captured.device_type
        self.alignment = alignment_of(self.device)
        self.copies: Copies | None = None
        self._captured = captured
        self._host = HostMemory(self.device) if host is None else host
        self.use(plan)

    def use(self, plan: Plan) -> None:
        """Put a plan in force whose graph is not recorded yet."""
        self.plan: Plan = plan
        self._schedule: OpSchedule = op_schedule(self._captured, plan)
        self.estimated: Graph = self._schedule.graph
        self.graph = self.estimated
        if self.copies is not None:
            self._host.release()  # the plan before may have needed more
        self.copies = None
        if (t := self._schedule.transfers) is not None:
            self.copies = Copies(t.num_bytes, t.places, t.after, self._host, t.host_bytes, torch.device(self.device))

    def costs(self) -> Costs:
        """Return the recorded costs of the ops of the captured graph."""
        return captured_costs(self._captured.graph, self.graph, self.plan)

    def given(self) -> Graph:
        """Return the graph as it was captured, with losses not chunked, and with the recorded costs of its ops."""
        costs, original, chunked = self.costs(), self._captured.original, self.plan.chunked
        if original is None or chunked is None:
            return costs.on(self._captured.graph)
        kept = chunked.part == Part.WHOLE
        whole = Costs(np.zeros(original.graph.num_ops, dtype=np.int64), np.zeros(original.graph.num_ops))
        for column, found in zip(whole, costs, strict=True):
            column[chunked.origin[kept]] = found[kept]
        return whole.on(original.graph)

    def eager_peak_bytes(self) -> int:
        """Return the peak of the program order of the step as it was captured, sizes rounded up."""
        return program_peak(self.given(), self.alignment)

    def compile_moved(self, replay: Replay | None, arranged: Arranged | None) -> Program:
        """Compile the step, in its arena where it has one, with its learning rates as tensors."""
        if replay is None or arranged is None:
            return self.compile(reads_rates=False)
        return self.compile_arranged(replay, arranged, reads_rates=False)

    def tell_lack(self, error: BaseException, replay: Replay | None, arranged: Arranged | None) -> None:
        """Add to an out-of-memory error of a GPU what the step needs, and release kept arenas for others."""
        if isinstance(error, torch.OutOfMemoryError):
            if replay is not None:
                replay.release()
            error.add_note(self.out_of_memory_note(arranged))

    def out_of_memory_note(self, arranged: Arranged | None) -> str:
        """Return the note for an out-of-memory error; arranged is the arena, where it is known."""
        table = arrange_known(self.estimated, self.plan, self.alignment) if arranged is None else arranged.table
        outputs = int(self.graph.tensor_bytes[self.graph.outputs].sum()) if arranged is None else arranged.output_bytes
        largest = int(self.graph.tensor_bytes[self.graph.writes.item].max(initial=0))
        needs = Needs(self.graph.resident_bytes, table.arena_bytes, outputs, largest)
        return out_of_memory_note(self.given(), needs, self.plan.peak_bytes)

    def replan(
        self, planner: Planner, agreement: Agreement, arranged: Arranged | None, progress: Progress | None
    ) -> Plan | None:
        """Return another plan where the arena does not fit the budget, or copies were planned by estimates.

        Args:
            planner: made the plan in force.
            agreement: of the ranks that run the step.
            arranged: the arena of the plan in force; None: there is none.
            progress: see olla.plan.
        """
        needed = peak = 0
        if arranged is not None:
            needed = self.graph.resident_bytes + arranged.output_bytes + arranged.table.arena_bytes
            peak = self.plan.peak_bytes
        costs = self.costs()
        return agreement.replan(needed, planner, lambda most: planner.replan(costs, most, peak, progress))

    def compile_recorded(self, recorder: Recorder) -> Program:
        """Return the step with a window around every op, to be recorded."""
        return self.compile(recorder, windows=range(self.graph.num_ops), note=recorder.note)

    def compile_arranged(self, replay: Replay, arranged: Arranged, **options: Any) -> Program:
        """Return the step with a window around every op that has a place in the arena."""
        windows = frozenset(np.flatnonzero(np.diff(arranged.table.op_offset)).tolist())
        return self.compile(replay, windows=windows, **options)

    def compile(self, allocator: Recorder | Replay | None = None, **options: Any) -> Program:
        """Return the step as a function: with the windows of an allocator, or on torch's own; see compile_program."""
        options |= {"schedule": self._schedule, "copies": self.copies, "allocator": allocator}
        return compile_program(self._captured, self.plan.order.tolist(), **options)


def prepared(
    captured: Captured,
    place: Place,
    planner: Planner | None,
    options: dict[str, Any],
    progress: Progress | None,
    ranks: Ranks | None,
) -> tuple[Captured, Plan]:
    """Return the step to run, with its losses in chunks where its goal says so, and its plan: found or made.

    Args:
        captured: the step.
        place: where its plan is kept.
        planner: plans it towards its goal; None: there is none.
        options: of a plan without a goal.
        progress: see olla.plan.
        ranks: that run the step; None: this process alone.

    Raises:
        BudgetError: nothing fits the budget.
    """

    def accept(found: Plan) -> None:
        if planner is not None:
            planner.accept(found)
        elif found.rewrites:
            raise PlanError("the plan is for another goal", rule="plan")

    def make() -> Plan:
        if planner is None:
            return plan(captured, layout=False, progress=progress, **options)
        return planner.plan(progress)

    own = place.load(captured.graph, accept)
    if ranks is not None:
        found = plan_together(ranks, own, captured.graph, make, accept)
    else:
        found = make() if own is None else own
    if found is not own:
        place.save(found)
    return captured if planner is None else planner.prepared(found), found
