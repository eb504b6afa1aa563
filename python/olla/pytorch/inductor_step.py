"""A captured step compiled by Inductor: as one graph of forward, backward and update where that needs less memory."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from olla.errors import ReplayError
from olla.graph import Graph
from olla.plan import Goal
from olla.pytorch.capture import Captured
from olla.pytorch.captures import Capture
from olla.pytorch.dynamo.follow import begin
from olla.pytorch.guards.facts import StepCall
from olla.pytorch.memory import arrange
from olla.pytorch.runner import in_plain_modes
from olla.pytorch.step import Step
from olla.report.progress import ProgressLine
from olla.report.step import StepReport

if TYPE_CHECKING:
    from olla.inductor.whole.compile import WholeStep

_NUM_TIMES = 100  # latest calls whose median is reported
_MIB = 2**20
_NO_PLAN = 'a step with kernels="inductor" has no plan: see step.report(), or compile it with kernels="torch"'
_ALIGNMENT = 64  # of sizes in the peak of the ordinary loop, in bytes
Loss = Callable[[Any, Any], Any]


class InductorRunner:
    """Runs one captured step that Inductor compiled; used in place of `Runner`.

    Args:
        captured: the step.
        goal: what is asked for; None: the backend's default, see `usual_goal`.
        max_recomputed: most flops to recompute, as a share of them all.
        separate: runs the step on a batch as separate graphs and the optimizer; None: there is no such way.

    Attributes:
        structure: of what the step returns.
        gradients: none: they die in the step.
        separate: function to call with the batch instead of `run`; None: call `run`.
    """

    def __init__(
        self,
        captured: Captured,
        goal: Goal | None,
        max_recomputed: float | None,
        separate: Callable[[Any], Any] | None,
    ) -> None:
        from olla.inductor.whole.compile import compile_step
        from olla.inductor.whole.joined import Asked

        self.structure = captured.structure
        self.gradients: list[tuple[str, bool]] = []
        self._captured = captured
        start = time.perf_counter()
        asked = Asked(goal, max_recomputed, compares=separate is not None)
        self._whole: WholeStep = compile_step(captured, asked)
        self._compile_seconds = time.perf_counter() - start
        self.separate = separate if self._whole.is_worse else None
        self._times: collections.deque[float] = collections.deque(maxlen=_NUM_TIMES)
        self._num_steps = 0

    @property
    def graph(self) -> Graph:
        """The step as it was captured; what Inductor makes of it has other operators."""
        return self._captured.graph

    @property
    def plan(self) -> NoReturn:
        """There is none.

        Raises:
            ReplayError: always.
        """
        raise ReplayError(_NO_PLAN)

    def run(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the step on the tensors of its inputs, and return the captured outputs."""
        assert self._whole.run is not None
        results: list[torch.Tensor] = self._timed(in_plain_modes, self._whole.run, values)
        return results

    def run_separate(self, batch: Any) -> Any:
        """Run the step as separate graphs and the optimizer."""
        assert self.separate is not None
        return self._timed(self.separate, batch)

    def plot(self, path: object, num_captures: int) -> NoReturn:
        """Raise a ReplayError: there is no plan to draw."""
        raise ReplayError(_NO_PLAN)

    def report(self, num_captures: int) -> StepReport:
        """Return the figures of this step; num_captures is for the report alone."""
        whole, graph = self._whole, self.graph
        peaks = {"one graph": whole.peak_bytes, "separate graphs": whole.separate_peak_bytes}
        known = ", ".join(f"{name} {num / _MIB:.1f} MiB" for name, num in peaks.items() if num is not None)
        taken = "separate graphs and the optimizer" if self.separate is not None else "one graph of Inductor"
        needed = whole.separate_peak_bytes if self.separate is not None else whole.peak_bytes
        return StepReport(
            name=graph.name,
            num_ops=graph.num_ops,
            num_steps=self._num_steps,
            num_captures=num_captures,
            in_arena=False,
            planned_peak_bytes=needed or 0,
            eager_peak_bytes=arrange.program_peak(graph, _ALIGNMENT),
            resident_bytes=graph.resident_bytes,
            seconds_per_step=statistics.median(self._times) if self._times else None,
            capture_seconds=sum(self._captured.seconds.values()),
            plan_seconds=self._compile_seconds,
            note=f"Compiled as {taken}; foreseen peaks: {known}.",
        )

    def _timed(self, step: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        results = step(*arguments)
        if self._num_steps:  # the first call also fills caches of libraries
            self._times.append(time.perf_counter() - start)
        self._num_steps += 1
        return results


class InductorStep(Step):
    """A compiled training step with Inductor's kernels; made by olla.compile.

    Args: see `Step` and `InductorRunner`.
    """

    def __init__(self, *arguments: Any, max_recomputed: float | None) -> None:
        super().__init__(*arguments)
        self._max_recomputed = max_recomputed
        self._separate: Callable[[Any], Any] | None = None

    def runs_beside(self, found: tuple[Capture, list[torch.Tensor], str]) -> bool:
        """Whether it runs the step on the batch, in place of a graph of Dynamo's."""
        runner: Any = found[0].runner
        return runner.separate is not None

    def _result(self, capture: Capture, values: list[torch.Tensor], batch: Any) -> Any:
        runner: Any = capture.runner
        return runner.run_separate(batch) if runner.separate is not None else super()._result(capture, values, batch)

    def _captured(self, call: StepCall) -> Captured:
        captured = super()._captured(call)
        if captured.graph.communicates.any():
            raise ReplayError('the step has collectives, which kernels="inductor" does not keep: use kernels="torch"')
        return captured

    def _prepare(self, call: StepCall) -> Capture:
        begin()  # a step that was captured before would be captured again for it: its guard sees other functions
        with ProgressLine(f"compiling {type(self._model).__name__}"):
            made, captured = self._capture(call)
        if self._separate is None and self._loss is not None:
            (optimizer,) = self.optimizers
            self._separate = separate_step(self._model, optimizer, self._loss, self._goal, self._max_recomputed)
        lowered: Any = InductorRunner(captured, self._goal, self._max_recomputed, self._separate)
        made.runner = lowered
        return made


def separate_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    goal: Goal | None,
    max_recomputed: float | None,
) -> Callable[[Any], Any]:
    """Return a step of the backend "olla" and the optimizer, which leaves no gradients."""
    options: dict[str, Any] = {} if max_recomputed is None else {"max_recomputed": max_recomputed}
    if goal is not None:
        budget = None if goal.budget_bytes is None else max(goal.budget_bytes - state_bytes(optimizer), 1)
        options |= {"budget": budget, "max_slowdown": goal.max_slowdown, "minimise": goal.minimise}
        options["device"] = goal.device
    compiled = torch.compile(loss, backend="olla", options=options)

    def run(batch: Any) -> Any:
        with torch.enable_grad():
            optimizer.zero_grad()
            result = compiled(model, batch)
            first = result[0] if isinstance(result, tuple | list) else result
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    return run


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
