"""One captured and planned step, ready to run: on torch's own allocator, or in an arena once it was recorded."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from olla.graph import Graph
from olla.picture.plot import write_page
from olla.plan import Plan
from olla.plan.plan import with_figures
from olla.pytorch.cache import Place, RecordedStep
from olla.pytorch.capture import Captured
from olla.pytorch.capture.storages import lighten
from olla.pytorch.memory import arrange
from olla.pytorch.memory.copies import HostMemory
from olla.pytorch.memory.replay import Allocations, Replay
from olla.pytorch.memory.requests import Recorder, Requests, with_costs, without_caches
from olla.pytorch.memory.selfcheck import SelfCheck
from olla.pytorch.planned import PlannedStep
from olla.pytorch.planner import Planner
from olla.pytorch.program.cudagraph import Graphed
from olla.pytorch.program.program import Program
from olla.pytorch.ranks.agreement import Agreement
from olla.pytorch.ranks.group import Ranks
from olla.pytorch.reports import Figures, step_scene
from olla.report.progress import ProgressLine
from olla.report.step import StepReport

_MAX_RECORDINGS = 3  # the first call makes requests that no later one does: caches of libraries
_LAYOUT_SHARE = 0.2  # of the time limit
Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Runner:
    """Runs one captured step in its planned order.

    Args:
        captured: the step.
        plan: its order.
        replay: the planned memory of the device; None: the step runs on torch's own allocator.
        note: for the report.
        place: where the step is kept on disk.
        cuda_graph: whether calls replay a CUDA graph once they repeat each other.
        planner: made the plan towards a budget, and makes a tighter one if need be; None: there is no budget.
        host: memory for what is swapped.
        self_check: whether the step leaves the arena where its first steps take more than planned.
        ranks: that run the step together; None: this process alone.

    Attributes:
        program: what runs at the next call.
        figures: of its calls, for the report.
        gradients: for each output after those of the structure, its parameter and whether it alone holds its memory.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        replay: Replay | None,
        note: str,
        place: Place,
        cuda_graph: bool = False,
        planner: Planner | None = None,
        host: HostMemory | None = None,
        self_check: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.structure = captured.structure
        self.gradients = _gradients(captured)
        self._captured = captured
        self._planner = planner
        self._planned = PlannedStep(captured, plan, host)
        self._replay = replay
        self._place = place
        self._cuda_graph = cuda_graph
        self._graphed: Graphed | None = None
        self._arranged: arrange.Arranged | None = None
        self._num_recordings = 0
        self._agreement = Agreement(ranks)
        self._self_check = SelfCheck(self._planned.device, self_check)
        self.figures = Figures(
            capture_seconds=sum(captured.seconds.values()),
            plan_seconds=0.0 if place.loaded else plan.seconds["total"],
            eager_peak_bytes=self._planned.eager_peak_bytes(),
            is_cached=place.loaded,
            notes=[note, place.note, planner.note if planner else ""],
        )
        found = place.load_recorded(self.graph) if replay is not None else None
        recorded = found if self._agreement.all_have(found.plan if found else None) else None
        self._is_kept = recorded is not None
        if replay is not None and recorded is not None:
            self._planned.graph, plan, self._arranged, self.figures.eager_peak_bytes = recorded
            self._planned.plan = with_figures(self.plan, plan, self.graph, self._planned.given())
            self.program = self._planned.compile_arranged(replay, recorded.arranged)
        else:
            self.program = self._planned.compile() if replay is None else self._compile_recorded()
        lighten(captured)

    @property
    def graph(self) -> Graph:
        """The graph that runs; with workspaces and seconds once it was recorded."""
        return self._planned.graph

    @property
    def plan(self) -> Plan:
        """The plan of this graph."""
        return self._planned.plan

    def run(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the step on the tensors of its inputs, and return the captured outputs."""
        return in_plain_modes(self._call, values)

    def _call(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        start = time.perf_counter()
        if self._replay is not None:
            self._replay.abandon()  # a second interrupt can cut the clearing up after the first one short
        copies = self._planned.copies
        try:
            if copies is not None:
                copies.begin()
            if self._replay is not None and self._arranged is None:
                results = self._record(self._replay, values)
            elif self._replay is None and self._planner is not None and not self._planner.is_measured:
                results = self._measure(self._planner, values)
            else:
                results = self._run(values)
                self.figures.add_time(time.perf_counter() - start)
            if copies is not None:
                copies.end()
        except BaseException as error:
            self._clear(error)
            self._planned.tell_lack(error, self._replay, self._arranged)
            raise
        self.figures.num_steps += 1
        return results

    def _run(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._cuda_graph and self._is_settled():
            if self._graphed is None:
                self._graphed = Graphed(self._run_program, self._captured, self._planned.copies, self._rates_on_device)
            return self._graphed(values)
        return self._run_program(values)

    def _rates_on_device(self) -> Program:
        self.program = self._planned.compile_moved(self._replay, self._arranged)
        return self._run_program

    def _run_program(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._replay is None or self._arranged is None:
            return self.program(values)
        return self._run_in_arena(self._replay, self._arranged, values)

    def _clear(self, error: BaseException) -> None:
        """Free the tensors of an interrupted step, which its frames hold, once no copy uses their memory."""
        if self._planned.copies is not None:
            self._planned.copies.abandon()
        traceback.clear_frames(error.__traceback__)
        if self._replay is not None:
            self._replay.abandon()  # their places are free

    def _is_settled(self) -> bool:
        """Whether libraries have filled their caches, and requests come as recorded: later steps repeat this one."""
        return self.figures.seen.num_steps > 0 if self._arranged else self.figures.num_steps > 1

    def _compile_recorded(self) -> Program:
        """Return the step with a window around every op, to be recorded."""
        self._graphed = None
        self._recorder = Recorder(self._replay, self.graph.num_ops, self._planned.device)
        return self._planned.compile_recorded(self._recorder)

    def _record(self, replay: Replay, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run and record with the graph's tensors in an arena and workspaces elsewhere, and lay out all requests.

        On torch's own allocator alone the first step would need more memory than those that follow.
        """
        start = time.perf_counter()
        known = arrange.arrange_known(self._planned.estimated, self.plan, self._planned.alignment)
        is_first = replay.held_bytes == 0
        replay.activate(known, recording=True)
        results = self.program(values)
        recorded = without_caches(replay.stop_recording(), results)
        middle = time.perf_counter()
        self._num_recordings += 1
        self._arrange(replay, recorded)
        if self._planned.device == "cpu" or is_first:  # later ones find what kernels take beside the arena, as calls do
            arrange.trim(self._planned.device)
        self.figures.add_preparation(middle - start, time.perf_counter() - middle)
        return results

    def _measure(self, planner: Planner, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run with every op timed, without recording memory, and choose the swaps by the measured times."""
        planned = self._planned
        clock = Recorder(None, self.graph.num_ops, planned.device)
        results = planned.compile_recorded(clock)(values)
        planned.graph = self._agreement.costs(dataclasses.replace(planned.estimated, seconds=clock.seconds))
        with ProgressLine(f"choosing copies of {planned.estimated.name}") as progress:
            found = planned.replan(planner, self._agreement, None, progress)
        planned.use(planned.plan if found is None else found)
        self.program = planned.compile()
        return results

    def _arrange(self, replay: Replay, recorded: Allocations) -> None:
        """Plan the order again where workspaces matter to it, and lay out the requests of the order that is to run."""
        planned, graph, before = self._planned, self._planned.estimated, self.plan
        with ProgressLine(f"laying out {graph.name}") as progress:
            agreement = self._agreement
            planned.graph = agreement.costs(with_costs(graph, recorded, self._recorder.seconds, planned.alignment))
            self.figures.eager_peak_bytes = self._planned.eager_peak_bytes()
            make = functools.partial(arrange.planned_again, self.graph, before, progress)
            planned.plan = with_figures(before, agreement.plan(self.graph, make), self.graph, planned.given())
            if not np.array_equal(self.plan.order, before.order):
                requests = Requests.of(recorded, self._recorder.addresses, graph)
                moved = requests.in_order(graph, self.plan.order)
                freed_at = requests.in_order(graph, before.order).freed_at
                if agreement.any(not np.array_equal(freed_at, recorded.freed_at)):
                    # Lifetimes do not follow from the graph alone: record the new order itself.
                    self.program = self._compile_recorded()
                    return
                recorded = moved
            self._lay_out(replay, recorded, progress)

    def _lay_out(self, replay: Replay, requests: Allocations, progress: ProgressLine | None) -> None:
        planned, planner, options = self._planned, self._planner, self.plan.options
        limit = _LAYOUT_SHARE * (planner.time_limit if planner else options["time_limit"])
        arranged = arrange.arrange(requests, self.graph.num_ops, planned.alignment, limit, options["seed"], progress)
        tighter = planned.replan(planner, self._agreement, arranged, progress) if planner is not None else None
        if tighter is not None:
            planned.use(tighter)
            self._num_recordings = 0
            self.program = self._compile_recorded()
            self._place.save(tighter)
            return
        self._agreement.is_open = False
        self._arranged = arranged
        self.program = self._planned.compile_arranged(replay, arranged)

    def _run_in_arena(
        self, replay: Replay, arranged: arrange.Arranged, values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        check = self._self_check
        try:
            if self._graphed is not None:
                replay.release()  # the arena of a CUDA graph is its own
            replay.activate(arranged.table, load_bytes=arranged.load_bytes)
            results = self.program(values)
            counters = replay.deactivate(keep_arena=self._graphed is None)
        except BaseException as error:
            self._clear(error)
            raise
        if counters.num_misses > 0 and (self.figures.num_steps == 0 or self._graphed is not None):
            return results  # the first call in a process or in a capture fills caches that libraries keep for later
        self.figures.seen.add(counters)
        if counters.num_misses > 0 and self._num_recordings < _MAX_RECORDINGS:
            self._arranged = None
            self._is_kept = False
            self.program = self._compile_recorded()
        elif check.is_open and (difference := check.difference(counters, arranged)):
            self._leave_arena(replay, difference)
        elif not self._is_kept and not check.is_open:
            self._place.save_recorded(RecordedStep(self.graph, self.plan, arranged, self.figures.eager_peak_bytes))
            self._is_kept = True
        return results

    def _leave_arena(self, replay: Replay, difference: str) -> None:
        """Go on in planned order on torch's own allocator, and say why."""
        note = f"The step runs in planned order on torch's own allocator, in no arena: {difference}; see arena=True."
        warnings.warn(note, stacklevel=1)
        self.figures.notes.append(note)
        replay.release()
        self._replay = self._arranged = None
        self.program = self._planned.compile()

    def plot(self, path: str | os.PathLike[str], num_captures: int) -> None:
        """Write the page of this step; see olla.plot."""
        write_page(step_scene(self._planned, self._arranged, self.report(num_captures)), path)

    def report(self, num_captures: int) -> StepReport:
        """Return the figures of this step; num_captures is for the report alone."""
        kept = self._replay.held_bytes if self._replay is not None else 0
        return self.figures.report(self._planned, self._arranged, self._planner, num_captures, kept)


def in_plain_modes(call: Call, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Call without gradients and autocast, since the captured step has its casts in it, on the device of the values."""
    # A context manager written in Python, such as no_grad(), leaves its mode on if Ctrl-C comes as it is entered.
    with_gradients = torch.is_grad_enabled()
    autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    device = next((value.device for value in values if value.is_cuda), None)
    before = None if device is None else torch.cuda.current_device()
    try:
        torch._C._set_grad_enabled(False)
        for kind in autocast:
            torch.set_autocast_enabled(kind, False)
        if device is not None:
            torch.cuda.set_device(device)  # arenas, streams and waits are those of the current one
        return call(values)
    finally:
        torch._C._set_grad_enabled(with_gradients)
        for kind in autocast:
            torch.set_autocast_enabled(kind, True)
        if before is not None:
            torch.cuda.set_device(before)


def _gradients(captured: Captured) -> list[tuple[str, bool]]:
    """Return, for each gradient among the outputs, its parameter and whether it alone holds its memory."""
    output: Any = captured.module.graph.output_node()
    held = [captured.tensors[node] for node in output.args[0]]
    count = Counter(t for tensors in held for t in tensors)
    kinds = captured.graph.tensor_kinds
    is_own = [all(count[t] == 1 and kinds[t] == "temporary" for t in tensors) for tensors in held]
    names = [name.removeprefix("gradient of ") for name in captured.outputs]
    return list(zip(names, is_own, strict=True))[captured.structure.num_tensors :]
