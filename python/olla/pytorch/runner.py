"""One captured and planned step, ready to run: on torch's own allocator, or recorded once and then in an arena."""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from olla.errors import ReplayError
from olla.plan import Plan
from olla.pytorch import recording
from olla.pytorch.cache import Place
from olla.pytorch.capture import Captured
from olla.pytorch.feeds import Source
from olla.pytorch.program import Program, compile_program
from olla.pytorch.replay import Counters, Miss, Replay
from olla.report.progress import ProgressLine
from olla.report.step import StepReport

_NUM_TIMES = 100  # latest calls whose median is reported
_MAX_RECORDINGS = 3  # the first call makes requests that no later one does: caches of libraries
_LAYOUT_SHARE = 0.2  # of the time limit
_NUM_MISSES = 5  # named in the report
_ALIGNMENT = {"cpu": 64}  # bytes; torch's allocators for accelerators align to 512


@dataclass
class _Seen:
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


class Runner:
    """Runs one captured step in its planned order.

    Args:
        captured: the step.
        plan: its order.
        sources: of input i, how to get its tensor from the leaves of a batch.
        replay: the planned memory of the device; None: the step runs on torch's own allocator.
        note: for the report.
        place: where the step is kept on disk; None: nowhere.

    Attributes:
        program: what runs at the next call.
        gradients: for each output after those of the structure, its parameter and whether it alone holds its memory.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        sources: Sequence[Source],
        replay: Replay | None,
        note: str,
        place: Place | None = None,
    ) -> None:
        self.structure = captured.structure
        self.gradients = _gradients(captured)
        self._captured = captured
        self._plan = plan
        self._sources = sources
        self._replay = replay
        self._place = place
        self._note = " ".join(text for text in (note, place.note if place else "") if text)
        self._alignment = _ALIGNMENT.get(_device_type(captured), 512)
        self._arranged: recording.Arranged | None = None
        self._num_recordings = 0
        self._eager_peak_bytes = plan.program_peak_bytes
        self._is_cached = place is not None and place.loaded
        self._seconds = {"capture": sum(captured.seconds.values()), "plan": plan.seconds["total"], "record": 0.0}
        if place is not None:
            self._seconds["capture"] += place.seconds
            self._seconds["plan"] *= not place.loaded
        self._times: collections.deque[float] = collections.deque(maxlen=_NUM_TIMES)
        self._num_steps = 0
        self._seen = _Seen()
        known = place.load_table() if place is not None and replay is not None else None
        if known is not None:
            self._arranged, self._eager_peak_bytes = known
        self._is_table_kept = known is not None
        self.program = self._compile(_windows(self._arranged, captured.graph.num_ops))

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run the step on a batch with these leaves, and return the captured outputs."""
        start = time.perf_counter()
        with torch.no_grad(), _no_autocast():
            values = [source(leaves) for source in self._sources]
            try:
                if self._replay is None:
                    results = self.program(values)
                elif self._arranged is None:
                    return self._record(self._replay, values)
                else:
                    results = self._run_in_arena(self._replay, self._arranged, values)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
                raise
        if self._num_steps > 0:
            self._times.append(time.perf_counter() - start)
        self._num_steps += 1
        return results

    def _compile(self, windows: Sequence[int]) -> Program:
        order = self._plan.order.tolist()
        if self._replay is None:
            return compile_program(self._captured, order)
        return compile_program(
            self._captured, order, begin=self._replay.begin, end=self._replay.end, windows=frozenset(windows)
        )

    def _record(self, replay: Replay, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on torch's own allocator, and lay out what it was asked for."""
        graph = self._captured.graph
        start = time.perf_counter()
        try:
            replay.start_recording(graph.num_ops)
            results = self.program(values)
        except BaseException:
            with contextlib.suppress(ReplayError):
                replay.stop_recording()
            raise
        recorded = replay.stop_recording()
        middle = time.perf_counter()
        options = self._plan.options
        with ProgressLine(f"laying out {graph.name}") as progress:
            self._arranged = recording.arrange(
                recorded,
                graph.num_ops,
                self._alignment,
                _LAYOUT_SHARE * options["time_limit"],
                options["seed"],
                progress,
            )
        self._eager_peak_bytes = recording.program_peak(recorded, graph, self._alignment)
        self.program = self._compile(_windows(self._arranged, graph.num_ops))
        self._num_recordings += 1
        self._num_steps += 1
        self._seen = _Seen()
        self._seconds["record"] += middle - start
        self._seconds["plan"] += time.perf_counter() - middle
        return results

    def _run_in_arena(
        self, replay: Replay, arranged: recording.Arranged, values: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        try:
            replay.activate(arranged.table)
            results = self.program(values)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # frees their places before the arena is left
            with contextlib.suppress(ReplayError):
                replay.deactivate(keep_arena=True)
            raise
        counters = replay.deactivate(keep_arena=True)
        if counters.num_misses > 0 and self._num_steps == 0:
            return results  # the first call of a process makes requests that no later one does: caches of libraries
        self._seen.add(counters)
        if counters.num_misses > 0 and self._num_recordings < _MAX_RECORDINGS:
            self._arranged = None
            self._is_table_kept = False
            self.program = self._compile(range(self._captured.graph.num_ops))
        elif self._place is not None and not self._is_table_kept:
            self._place.save_table(arranged, self._eager_peak_bytes)
            self._is_table_kept = True
        return results

    def report(self, num_captures: int) -> StepReport:
        """Return the figures of this step; num_captures is for the report alone."""
        graph, arranged = self._captured.graph, self._arranged
        base = graph.resident_bytes + (arranged.output_bytes if arranged else 0)
        seen = self._seen
        return StepReport(
            name=graph.name,
            num_ops=graph.num_ops,
            num_steps=self._num_steps,
            num_captures=num_captures,
            in_arena=arranged is not None,
            planned_peak_bytes=base + arranged.load_bytes if arranged else self._plan.peak_bytes,
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
            cached=self._is_cached,
            note=self._note,
        )


def _windows(arranged: recording.Arranged | None, num_ops: int) -> Sequence[int]:
    """Return the ops that request memory, as far as that is known."""
    if arranged is None:
        return range(num_ops)
    found: list[int] = np.flatnonzero(np.diff(arranged.table.op_offset)).tolist()
    return found


def _device_type(captured: Captured) -> str:
    """Return where the step runs: a learning rate is on the CPU everywhere."""
    nodes = (n for n in captured.module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    return next((n.meta["val"].device.type for n in nodes if n.meta["val"].device.type != "cpu"), "cpu")


def _gradients(captured: Captured) -> list[tuple[str, bool]]:
    """Return, for each gradient among the outputs, its parameter and whether it alone holds its memory."""
    output = next(n for n in reversed(captured.module.graph.nodes) if n.op == "output")
    held = [captured.tensors[node] for node in output.args[0]]
    count = collections.Counter(t for tensors in held for t in tensors)
    kinds = captured.graph.tensor_kinds
    is_own = [all(count[t] == 1 and kinds[t] == "temporary" for t in tensors) for tensors in held]
    names = [name.removeprefix("gradient of ") for name in captured.outputs]
    return list(zip(names, is_own, strict=True))[captured.structure.num_tensors :]


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Keep autocast, if it is on, from what it captured already."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with contextlib.ExitStack() as stack:
        for kind in on:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
