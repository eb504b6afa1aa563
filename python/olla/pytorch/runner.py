"""One captured and planned step, ready to run: on torch's own allocator, or recorded once and then in an arena."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from olla.graph import Graph
from olla.plan import Costs, Plan
from olla.pytorch.cache import Known, Place
from olla.pytorch.capture import Captured
from olla.pytorch.cudagraph import Graphed
from olla.pytorch.memory import arrange
from olla.pytorch.memory.copies import Copies, HostMemory
from olla.pytorch.memory.replay import Allocations, Replay
from olla.pytorch.memory.requests import Recorder, Requests, with_costs
from olla.pytorch.planner import Planner, captured_costs
from olla.pytorch.program.program import Program, compile_program
from olla.pytorch.program.script import Script, script
from olla.pytorch.reports import Seen, budget_report, swap_report
from olla.report.progress import ProgressLine
from olla.report.step import StepReport

_NUM_TIMES = 100  # latest calls whose median is reported
_MAX_RECORDINGS = 3  # the first call makes requests that no later one does: caches of libraries
_LAYOUT_SHARE = 0.2  # of the time limit
_NUM_SLOWEST = 5  # the same
_ALIGNMENT = {"cpu": 64}  # bytes; torch's allocators for accelerators align to 512


class Runner:
    """Runs one captured step in its planned order.

    Args:
        captured: the step.
        plan: its order.
        replay: the planned memory of the device; None: the step runs on torch's own allocator.
        note: for the report.
        place: where the step is kept on disk; None: nowhere.
        cuda_graph: whether calls replay a CUDA graph once they repeat each other.
        planner: made the plan towards a budget, and makes a tighter one if need be; None: there is no budget.
        host: memory for what is swapped.

    Attributes:
        program: what runs at the next call.
        graph: of what runs; with workspaces and seconds once it was recorded.
        plan: of this graph.
        gradients: for each output after those of the structure, its parameter and whether it alone holds its memory.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        replay: Replay | None,
        note: str,
        place: Place | None = None,
        cuda_graph: bool = False,
        planner: Planner | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.structure = captured.structure
        self.gradients = _gradients(captured)
        self._captured = captured
        self._planner = planner
        self._device = device_type(captured)
        self._host = HostMemory(self._device) if host is None else host
        self._copies: Copies | None = None
        self.plan: Plan
        self._use(plan)
        self._replay = replay
        self._place = place
        notes = (note, place.note if place else "", planner.note if planner else "")
        self._note = " ".join(text for text in notes if text)
        self._cuda_graph = cuda_graph
        self._graphed: Graphed | None = None
        self._alignment = _ALIGNMENT.get(self._device, 512)
        self._arranged: arrange.Arranged | None = None
        self._num_recordings = 0
        self._eager_peak_bytes = self._eager_peak(captured.graph)
        self._is_cached = place is not None and place.loaded
        self._seconds = {"capture": sum(captured.seconds.values()), "plan": plan.seconds["total"], "record": 0.0}
        self._seconds["plan"] *= not self._is_cached
        self._times: collections.deque[float] = collections.deque(maxlen=_NUM_TIMES)
        self._num_steps = 0
        self._seen = Seen()
        known = place.load_known(self._plain) if place is not None and replay is not None else None
        self._is_known = known is not None
        if known is not None:
            self.graph, found, self._arranged, self._eager_peak_bytes = known
            self.plan = self.plan.with_figures(found, self.graph)
            self.program = self._compile_arranged()
        elif replay is not None:
            self.program = self._compile_recorded()
        else:
            self.program = compile_program(captured, plan.order.tolist(), script=self._script, copies=self._copies)

    def _use(self, plan: Plan) -> None:
        """Take a plan of the captured graph, or of a rewriting of it, which is not recorded yet."""
        self.plan = plan
        self._script: Script = script(self._captured, plan)
        self._plain: Graph = self._script.graph  # without what was recorded
        self.graph = self._plain
        if self._copies is not None:
            self._host.release()  # the plan before may have needed more
        self._copies = None
        if (t := self._script.transfers) is not None:
            device = torch.device(self._device)
            self._copies = Copies(t.num_bytes, t.places, t.after, self._host, t.host_bytes, device)

    def run(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the step on the tensors of its inputs, and return the captured outputs."""
        # A context manager written in Python, such as no_grad(), leaves its mode on if Ctrl-C comes as it is entered.
        with_gradients = torch.is_grad_enabled()
        autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        try:
            torch._C._set_grad_enabled(False)
            for kind in autocast:
                torch.set_autocast_enabled(kind, False)  # the captured step has its casts in it
            return self._call(values)
        finally:
            torch._C._set_grad_enabled(with_gradients)
            for kind in autocast:
                torch.set_autocast_enabled(kind, True)

    def _call(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        start = time.perf_counter()
        if self._replay is not None:
            self._replay.abandon()  # a second interrupt can cut the clearing up after the first one short
        copies = self._copies
        try:
            if copies is not None:
                copies.begin()
            if self._replay is not None and self._arranged is None:
                results = self._record(self._replay, values)
            elif self._replay is None and self._planner is not None and not self._planner.is_measured:
                results = self._measure(self._planner, values)
            else:
                results = self._run(values)
                if self._num_steps > 0:
                    self._times.append(time.perf_counter() - start)
            if copies is not None:
                copies.end()
        except BaseException as error:
            self._clear(error)
            raise
        self._num_steps += 1
        return results

    def _run(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._cuda_graph and self._is_settled():
            self._graphed = self._graphed or Graphed(self._run_program, self._captured.inputs)
            return self._graphed(values)
        return self._run_program(values)

    def _run_program(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._replay is None or self._arranged is None:
            return self.program(values)
        return self._run_in_arena(self._replay, self._arranged, values)

    def _clear(self, error: BaseException) -> None:
        """Free the tensors of an interrupted step, which its frames hold, once no copy uses their memory."""
        if self._copies is not None:
            self._copies.abandon()
        traceback.clear_frames(error.__traceback__)

    def _is_settled(self) -> bool:
        """Whether libraries have filled their caches, and requests come as recorded: later steps repeat this one."""
        return self._seen.num_steps > 0 if self._arranged else self._num_steps > 1

    def _compile_recorded(self) -> Program:
        """Return the step with a window around every op, to be recorded."""
        assert self._replay is not None
        self._graphed = None
        num_ops = self.graph.num_ops
        self._recorder = recorder = Recorder(self._replay, num_ops, self._device)
        return compile_program(
            self._captured,
            self.plan.order.tolist(),
            script=self._script,
            begin=recorder.begin,
            end=recorder.end,
            windows=range(num_ops),
            note=recorder.note,
            copies=self._copies,
        )

    def _compile_arranged(self) -> Program:
        """Return the step with a window around every op that has a place in the arena."""
        assert self._replay is not None
        assert self._arranged is not None
        return compile_program(
            self._captured,
            self.plan.order.tolist(),
            script=self._script,
            begin=self._replay.begin,
            end=self._replay.end,
            windows=frozenset(np.flatnonzero(np.diff(self._arranged.table.op_offset)).tolist()),
            copies=self._copies,
        )

    def _record(self, replay: Replay, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on torch's own allocator, and lay out what it was asked for."""
        start = time.perf_counter()
        try:
            replay.start_recording(self.graph.num_ops)
            results = self.program(values)
            recorded = replay.stop_recording()
        except BaseException as error:
            replay.abandon()
            if arrange.is_out_of_memory(error):
                self._arrange_unrecorded(replay)
            raise
        middle = time.perf_counter()
        self._num_recordings += 1
        self._arrange(replay, recorded)
        if self._device == "cpu":
            arrange.trim()
        self._seen = Seen()
        self._seconds["record"] += middle - start
        self._seconds["plan"] += time.perf_counter() - middle
        return results

    def _measure(self, planner: Planner, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run with a clock around every op, where no memory is recorded, and choose the copies by what it says."""
        order, num_ops = self.plan.order.tolist(), self.graph.num_ops
        clock = Recorder(None, num_ops, self._device)
        hooks: dict[str, Any] = {"begin": clock.begin, "end": clock.end, "windows": range(num_ops)}
        program = compile_program(self._captured, order, script=self._script, copies=self._copies, **hooks)
        results = program(values)
        self.graph = dataclasses.replace(self._plain, seconds=clock.seconds)
        with ProgressLine(f"choosing copies of {self._plain.name}") as progress:
            found = planner.again(self._captured, self._costs(), self._device, 0, 0, progress)
        self._use(self.plan if found is None else found)
        order = self.plan.order.tolist()
        self.program = compile_program(self._captured, order, script=self._script, copies=self._copies)
        return results

    def _arrange(self, replay: Replay, recorded: Allocations) -> None:
        """Plan the order again where workspaces matter to it, and lay out the requests of the order that is to run."""
        plain = self._plain
        with ProgressLine(f"laying out {plain.name}") as progress:
            self.graph = with_costs(plain, recorded, self._recorder.seconds, self._alignment)
            self._eager_peak_bytes = self._eager_peak(self._costs().on(self._captured.graph))
            before = self.plan
            self.plan = before.with_figures(arrange.planned_again(self.graph, before, progress), self.graph)
            if not np.array_equal(self.plan.order, before.order):
                requests = Requests.of(recorded, self._recorder.addresses, plain)
                moved = requests.in_order(plain, self.plan.order)
                if not np.array_equal(requests.in_order(plain, before.order).freed_at, recorded.freed_at):
                    # Something else than the graph says decides how long memory lives.
                    self.program = self._compile_recorded()
                    return
                recorded = moved
            self._lay_out(replay, recorded, progress)

    def _arrange_unrecorded(self, replay: Replay) -> None:
        self._note = (
            "There was not enough memory to record the step: planned without the workspaces of kernels, which come "
            "from torch's own allocator and count as missed."
        )
        self._num_recordings = _MAX_RECORDINGS
        graph = self._plain
        self._lay_out(replay, Requests.of_graph(graph).in_order(graph, self.plan.order), None)

    def _lay_out(self, replay: Replay, requests: Allocations, progress: ProgressLine | None) -> None:
        options = self.plan.options
        limit = _LAYOUT_SHARE * (self._planner.time_limit if self._planner else options["time_limit"])
        arranged = arrange.arrange(requests, self.graph.num_ops, self._alignment, limit, options["seed"], progress)
        if self._planner is not None and (tighter := self._tighter(self._planner, arranged, progress)) is not None:
            self._use(tighter)
            self._num_recordings = 0
            self.program = self._compile_recorded()
            if self._place is not None:
                self._place.save(tighter)
            return
        self._arranged = arranged
        self.program = self._compile_arranged()

    def _tighter(self, planner: Planner, arranged: arrange.Arranged, progress: ProgressLine | None) -> Plan | None:
        """Return another plan where the arena does not fit the budget, or copies were planned by estimates."""
        needed = self.graph.resident_bytes + arranged.output_bytes + arranged.table.arena_bytes
        peak = self.plan.peak_bytes
        return planner.again(self._captured, self._costs(), self._device, needed, peak, progress)

    def _eager_peak(self, costs: Graph) -> int:
        """Return the peak of the program order; of losses that run in chunks, the whole ones count, unrecorded."""
        original = self._captured.original
        return arrange.program_peak(original.graph if original else costs, self._alignment)

    def _costs(self) -> Costs:
        """Return what was recorded, of the ops of the captured graph."""
        return captured_costs(self._captured.graph, self.graph, self.plan)

    def _run_in_arena(
        self, replay: Replay, arranged: arrange.Arranged, values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        try:
            if self._graphed is not None:
                replay.release()  # the arena of a CUDA graph is its own
            replay.activate(arranged.table)
            results = self.program(values)
            counters = replay.deactivate(keep_arena=self._graphed is None)
        except BaseException as error:
            self._clear(error)  # frees their places before the arena is left
            replay.abandon()
            raise
        if counters.num_misses > 0 and self._num_steps == 0:
            return results  # the first call of a process makes requests that no later one does: caches of libraries
        self._seen.add(counters)
        if counters.num_misses > 0 and self._num_recordings < _MAX_RECORDINGS:
            self._arranged = None
            self._is_known = False
            self.program = self._compile_recorded()
        elif self._place is not None and not self._is_known:
            self._place.save_known(Known(self.graph, self.plan, arranged, self._eager_peak_bytes))
            self._is_known = True
        return results

    def report(self, num_captures: int) -> StepReport:
        """Return the figures of this step; num_captures is for the report alone."""
        graph, arranged = self.graph, self._arranged
        base = graph.resident_bytes + (arranged.output_bytes if arranged else 0)
        seen, planner, copies = self._seen, self._planner, self._copies
        stall = copies.stall_seconds if copies else None
        host_budget = planner.swapping.host_bytes if planner and planner.swapping else None
        return StepReport(
            name=graph.name,
            num_ops=graph.num_ops,
            num_steps=self._num_steps,
            num_captures=num_captures,
            in_arena=arranged is not None,
            planned_peak_bytes=base + arranged.load_bytes if arranged else self.plan.peak_bytes,
            measured_peak_bytes=base + seen.peak_bytes if arranged and seen.num_steps else None,
            eager_peak_bytes=self._eager_peak_bytes,
            resident_bytes=graph.resident_bytes,
            output_bytes=arranged.output_bytes if arranged else 0,
            arena_bytes=arranged.table.arena_bytes if arranged else 0,
            num_misses=seen.num_misses,
            missed_bytes=seen.missed_bytes,
            misses=tuple(
                f"missed: {m.num_bytes} bytes, request {m.index} of op {m.op} ({graph.op_names[m.op]}): {m.reason}"
                for m in seen.misses
            ),
            seconds_per_step=statistics.median(self._times) if self._times else None,
            capture_seconds=self._seconds["capture"],
            plan_seconds=self._seconds["plan"],
            record_seconds=self._seconds["record"],
            slowest=self._slowest(),
            cached=self._is_cached,
            note=self._note,
            budget=budget_report(self.plan, planner.budget_bytes if planner else None, graph.seconds, stall),
            swap=swap_report(self.plan, copies.host_bytes if copies else 0, host_budget, stall),
        )

    def _slowest(self) -> tuple[tuple[str, float], ...]:
        seconds = self.graph.seconds
        slowest = np.argsort(-seconds, kind="stable")[:_NUM_SLOWEST]
        return tuple((self.graph.op_names[v], float(seconds[v])) for v in slowest if seconds[v] > 0)


def device_type(captured: Captured) -> str:
    """Return where the step runs: a learning rate is on the CPU everywhere."""
    nodes = (n for n in captured.module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((n.meta["val"].device.type for n in nodes if n.meta["val"].device.type != "cpu"), "cpu")


def _gradients(captured: Captured) -> list[tuple[str, bool]]:
    """Return, for each gradient among the outputs, its parameter and whether it alone holds its memory."""
    output = next(n for n in reversed(captured.module.graph.nodes) if n.op == "output")
    held = [captured.tensors[node] for node in output.args[0]]
    count = Counter(t for tensors in held for t in tensors)
    kinds = captured.graph.tensor_kinds
    is_own = [all(count[t] == 1 and kinds[t] == "temporary" for t in tensors) for tensors in held]
    names = [name.removeprefix("gradient of ") for name in captured.outputs]
    return list(zip(names, is_own, strict=True))[captured.structure.num_tensors :]
