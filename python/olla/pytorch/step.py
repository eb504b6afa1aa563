"""A compiled training step: captured, planned and run. Importing this does not import torch."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from olla.errors import CaptureError, ReplayError
from olla.pytorch.capture import Captured, require_choice
from olla.pytorch.capture.capture import capture
from olla.pytorch.ordinary.calls import called
from olla.pytorch.ordinary.refusals import goal_of_gradients, must_be_planned, without_update
from olla.pytorch.step_attributes import StepAttributes

if TYPE_CHECKING:
    import torch

    from olla.aten.pieces import Pieces
    from olla.pytorch.captures import Capture
    from olla.pytorch.dynamo.follower import Follower
    from olla.pytorch.guards.facts import StepCall
    from olla.pytorch.memory.replay import Replay
    from olla.pytorch.ranks.group import Ranks

_steps: weakref.WeakSet[Step] = weakref.WeakSet()
_CROWDED = (
    "the step needed more than {} captures, this one because of a change: {}. Pad batches to few shapes, pass numbers "
    "that change in with the batch as tensors, or raise cache_size"
)


@dataclass(eq=False)
class Step(StepAttributes):
    """A compiled training step; made by olla.compile.

    An exception in the middle of a call (out of memory, Ctrl-C) leaves the process healthy and the next call correct;
    as in an ordinary loop, buffers, and parameters whose update ran already, then have their new values.
    """

    def __post_init__(self) -> None:
        import torch

        from olla.pytorch.binding import device_of
        from olla.pytorch.captures import Captures
        from olla.pytorch.memory.copies import HostMemory
        from olla.pytorch.ordinary.unplanned import Unplanned

        given, body = self._optimizer, self._body
        self.optimizers = () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)
        self._unplanned = Unplanned(
            self._model,
            self.optimizers,
            self._loss,
            None if body is None else functools.partial(body, self._model, given),
            self._on_unsupported,
            self._cache_size,
        )
        if self._cache_size < 1:
            raise ValueError(f"cache_size is {self._cache_size}, expected 1 or more")
        require_choice(self._checks)
        here = self._device = device_of(self._model)
        self._host = HostMemory(self._device.type)
        self._captures = Captures(self._cache_size)
        self._follower = _follower(self, self._loss, 2 * self._cache_size) if body is None else None
        self._ranks: Ranks | None = None  # that run the step together, once it is known that it communicates
        self._num_agreed = 0
        self._lock = threading.Lock()
        _steps.add(self)
        self._replay: Replay | None = None
        self._note = self._crowded = ""  # the latter: why a capture was made for which another one was dropped
        if self._cuda_graph and here.type != "cuda":
            raise ReplayError(f"cuda_graph=True needs CUDA, and the model is on {here}: move it there, or leave it out")
        wanted = here if self._required_device is None else torch.device(self._required_device)
        if wanted.type != here.type or wanted.index not in (None, here.index):
            raise ReplayError(f"the step is meant for {wanted}, and the model is on {here}: move it, then compile")

    def __call__(self, batch: Any) -> Any:
        """Run one step.

        Args:
            batch: see olla.capture. The first one with new shapes or types is captured and planned before it runs.

        Returns:
            What ``loss(model, batch)`` returns, without a gradient; without a loss, what the model returns.

        Raises:
            CaptureError: the step cannot be captured, and on_unsupported is "raise" or it is no training step at all.
            ReplayError: the step is called by one of its own operators.
        """
        from olla.pytorch.ordinary.loop import inferred

        with called(self), self._lock:
            result = self.run(batch)
        return inferred(self._model, result) if self._loss is None and self._body is None else result

    def recapture(self) -> None:
        """Forget all captures and refused batches: the next call captures the step anew.

        For changes that no guard sees, and after a fix of what stopped a capture.
        """
        from olla.pytorch.captures import Captures

        with self._lock:
            self._captures = Captures(self._cache_size)
            self._unplanned.forget()
            if self._follower is not None:
                self._follower.forget()

    def release(self) -> None:
        """Give the memory of the arena, and that in the host, back until the next call, for work outside the step."""
        self._host.release()
        if self._replay is not None:
            self._replay.release()

    def run(self, batch: Any) -> Any:
        """Run one step as part of another one that is under way; all other callers call the step itself."""
        self._crowded = ""
        result = self._run_call(self._call(batch if self._padding is None else self._padding.padded(batch)))
        if self._crowded:
            warnings.warn(_CROWDED.format(self._cache_size, self._crowded), stacklevel=3)
        return result

    def _run_call(self, call: StepCall) -> Any:
        if (follower := self._follower) is not None and follower.takes(call):
            result = follower.run(call)
            if result is not follower.NOT_TAKEN:
                return result
        found = self.find(call)
        if isinstance(found, Exception):
            return self._unplanned.refuse(found, call.key, call.batch, *_other_ways(self))
        if found is None:
            return self._unplanned.run(call.key, call.batch)
        return self.run_found(*found, call.batch)

    def prepare(self, batch: Any) -> None:
        """Capture and plan the step for a batch, without running it.

        Raises:
            CaptureError: the step cannot be captured.
        """
        call, found = self._call(batch), None
        if (follower := self._follower) is not None and follower.takes(call):
            found = follower.run(call, only_prepares=True)
            found = None if found is follower.NOT_TAKEN else found
        found = found or self.find(call)
        if isinstance(found, Exception):
            raise found
        if found is not None:
            self._captures.use(found[0])

    def _call(self, batch: Any) -> StepCall:
        from olla.pytorch.binding import batch_key, flatten
        from olla.pytorch.guards.facts import StepCall

        leaves, spec = flatten(batch)
        return StepCall(batch, batch_key(leaves, spec, self._device.type), leaves, self._loss)

    def find(self, call: StepCall) -> tuple[Capture, list[torch.Tensor], str] | Exception | None:
        """Return the capture for a call, with its input tensors and why it was made; or the error that prevents one.

        None: an earlier call has shown that there is none.
        """
        from olla.pytorch.capture.exclusive import between

        with between():
            capture, values, reason = self._captures.find(call)
        if self._ranks is not None and len(set(self._ranks.numbers(capture.number if capture else -1))) > 1:
            capture, reason = None, "another rank captured the step anew"
        reason = call.change or reason
        if capture is not None:
            return capture, values, reason
        if self._unplanned.takes(call.key):
            return None
        if call.loss is self._loss and self._follower is not None and self._follower.refusal is not None:
            return self._follower.refusal
        try:
            capture = self._prepare(call)
            with between():
                return capture, capture.gather(call.leaves), reason
        except Exception as error:
            if must_be_planned(error, self._ranks is None and _is_alone(self._model)):
                raise
            return error

    def runs_beside(self, found: tuple[Capture, list[torch.Tensor], str]) -> bool:
        """Whether it runs the step on the batch, in place of a graph of Dynamo's."""
        return False

    def run_found(self, capture: Capture, values: list[torch.Tensor], reason: str, batch: Any) -> Any:
        """Run a capture on its tensors; ``reason``: why it was made."""
        result = self._result(capture, values, batch)
        if self._captures.use(capture):
            self._crowded = reason
        return result

    def _result(self, capture: Capture, values: list[torch.Tensor], batch: Any) -> Any:
        return capture.run(values, self._model, self._ranks)

    def _captured(self, call: StepCall) -> Captured:
        if len(self.optimizers) > 1:
            raise CaptureError(
                f"the step has {len(self.optimizers)} optimizers, and the update of one is captured: give it one "
                "optimizer with several groups of parameters, where they are of one kind."
            )
        captured = capture(
            self._model,
            call.batch,
            optimizer=self.optimizers[0] if self.optimizers else None,
            loss=call.loss,
            step=self._body,
            checks=self._checks,
            keep_gradients=self._keep_gradients,
        )
        captured.structure.check()
        return captured

    def _prepare(self, call: StepCall) -> Capture:
        from olla.pytorch.cache import Place, find
        from olla.pytorch.planned import prepared
        from olla.pytorch.planner import Planner
        from olla.pytorch.runner import Runner
        from olla.report.progress import ProgressLine

        planner, goal = None, self._goal
        options = self._options if goal is None else {**self._options, "goal": goal, "swapping": self._swapping}
        with ProgressLine(f"compiling {type(self._model).__name__}") as progress:
            run = functools.partial(self._capture, call)
            made, captured = run() if self._ranks is None else self._ranks.together(run)
            ranks = self._agree(made, captured, dict(options))
            place = find(captured, options) if self._disk_cache else Place("")
            if goal is not None:
                planner = Planner(captured, goal, self._options, self._swapping, replays=not self._cuda_graph)
            captured, found = prepared(captured, place, planner, options, progress, ranks)
            replay, note = self._planned_memory()
            if ranks is not None and not all(ranks.numbers(replay is not None)):
                replay, note = None, f"{note} A rank has no planned memory, so none has.".strip()
            if self._checks == "skip":
                note = f"{note} What the step checks of values is skipped: checks='skip'.".strip()
        made.runner = Runner(
            captured, found, replay, note, place, self._cuda_graph, planner, self._host, self._arena is None, ranks
        )
        return made

    def _capture(self, call: StepCall) -> tuple[Capture, Captured]:
        from olla.pytorch.capture.exclusive import between
        from olla.pytorch.capture.inputs import InputBinding
        from olla.pytorch.capture.optimizers import kept_on_error
        from olla.pytorch.captures import Capture

        optimizer = self.optimizers[0] if self.optimizers else None
        captured = self._captured(call)
        with between(), kept_on_error(optimizer):
            return Capture(captured, call, InputBinding(self._model, optimizer)), captured

    def _agree(self, made: Capture, captured: Captured, options: dict[str, Any]) -> Ranks | None:
        """Return the ranks that run a step, once they have captured the same; None: there is one only."""
        from olla.pytorch.ranks.agreement import agree
        from olla.pytorch.ranks.group import ranks_of

        if self._ranks is None and captured.graph.communicates.any():
            self._ranks = ranks_of(name for name in captured.graph.groups if name)
        if self._ranks is not None:
            options |= {"arena": self._arena, "cuda_graph": self._cuda_graph, "checks": self._checks}
            agree(self._ranks, captured.graph, captured.module.graph.nodes, options)
            self._num_agreed = made.number = max(self._ranks.numbers(self._num_agreed)) + 1
        return self._ranks

    def _planned_memory(self) -> tuple[Replay | None, str]:
        """Return the planned memory of the device, or None and why there is none."""
        if self._replay is None and not self._note:
            from olla.pytorch.memory.replay import planned_memory

            self._replay, self._note = planned_memory(self._device, self._arena)
            if self._replay is not None:
                weakref.finalize(self, self._replay.release).atexit = False
        return self._replay, self._note


def _other_ways(step: Step) -> tuple[Callable[[], Step] | None, Callable[[], Pieces] | None]:
    """Return factories of the fallbacks: a step without its update, and planned pieces; None: does not apply."""

    def pieces() -> Pieces:
        from olla.aten.pieces import Pieces

        return Pieces(step.model, step.loss, goal_of_gradients(step), step._options["time_limit"])

    if type(step) is not Step or (step.loss is None and step._body is None):  # other kernels; inference
        return None, None
    splits = step.loss is not None and step.optimizers and not step._keep_gradients
    return functools.partial(without_update, step) if splits else None, pieces


def _follower(step: Step, loss: Callable[[Any, Any], Any] | None, most_graphs: int) -> Follower | None:
    """Return what takes the calls of a step that Dynamo can follow; None: there are none."""
    if not _is_alone(step.model):
        return None
    with contextlib.suppress(ImportError):  # it needs private names of torch
        from olla.pytorch.dynamo.follow import leave_alone
        from olla.pytorch.dynamo.follower import Follower
        from olla.pytorch.ordinary.loop import inference

        leave_alone(Step.__call__)
        return Follower(step, loss or inference, loss is not None, most_graphs)
    return None


def _is_alone(model: torch.nn.Module) -> bool:
    """Whether a model is neither in a DistributedDataParallel nor in FSDP2."""
    from olla.pytorch.ranks.wrapped import is_wrapped
    from olla.pytorch.sharded.fully import is_sharded

    return not is_wrapped(model) and not is_sharded(model)


def _after_fork() -> None:
    """Let a child call the steps that another thread of its parent was busy with."""
    for step in _steps:
        step._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
