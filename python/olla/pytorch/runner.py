"""One captured and planned step, ready to run: on torch's own allocator, or recorded once and then in an arena."""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from olla.plan import Plan
from olla.pytorch.capture import Captured
from olla.pytorch.feeds import Source
from olla.pytorch.program import compile_program
from olla.report.step import StepReport

_NUM_TIMES = 100  # latest calls whose median is reported


class Runner:
    """Runs one captured step in its planned order.

    Args:
        captured: the step.
        plan: its order.
        sources: of input i, how to get its tensor from the leaves of a batch.
        arena: whether to run at planned addresses where that is possible.
    """

    def __init__(self, captured: Captured, plan: Plan, sources: Sequence[Source], arena: bool) -> None:
        self.graph = captured.graph
        self.plan = plan
        self.structure = captured.structure
        self.gradients = _gradients(captured)
        self._sources = sources
        self.program = compile_program(captured, plan.order.tolist())
        self._seconds = {"capture": sum(captured.seconds.values()), "plan": plan.seconds["total"], "record": 0.0}
        self._times: collections.deque[float] = collections.deque(maxlen=_NUM_TIMES)
        self._num_steps = 0

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run the step on a batch with these leaves, and return the captured outputs."""
        start = time.perf_counter()
        with torch.no_grad(), _no_autocast():
            values = [source(leaves) for source in self._sources]
            try:
                results = self.program(values)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
                raise
        if self._num_steps > 0:
            self._times.append(time.perf_counter() - start)
        self._num_steps += 1
        return results

    def report(self, num_captures: int) -> StepReport:
        """Return the figures of this step; num_captures is for the report alone."""
        return StepReport(
            name=self.graph.name,
            num_ops=self.graph.num_ops,
            num_steps=self._num_steps,
            num_captures=num_captures,
            in_arena=False,
            planned_peak_bytes=self.plan.peak_bytes,
            measured_peak_bytes=None,
            eager_peak_bytes=self.plan.program_peak_bytes,
            resident_bytes=self.graph.resident_bytes,
            output_bytes=0,
            arena_bytes=0,
            num_misses=0,
            missed_bytes=0,
            misses=(),
            seconds_per_step=statistics.median(self._times) if self._times else None,
            capture_seconds=self._seconds["capture"],
            plan_seconds=self._seconds["plan"],
            record_seconds=self._seconds["record"],
            note="",
        )


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
