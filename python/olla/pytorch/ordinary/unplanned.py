"""Running a step that cannot be captured: its planned passes, its planned pieces, or all of it as it is."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from olla.errors import FIRST_STEP, MISUSE, SPENT, CaptureError, OllaError, free_frames
from olla.pytorch.ordinary import calls
from olla.pytorch.ordinary.loop import first_of, run_step, update
from olla.report.step import StepReport

WAYS = ("warn", "raise")  # what becomes of a step that cannot be captured
_MAX_REASONS = 3  # in the report
_Key = tuple[Any, ...]


class Inner(Protocol):
    """A step that plans forward and backward, and leaves gradients."""

    def prepare(self, batch: Any) -> None:
        """Capture and plan it; raise an exception where that cannot be done."""

    def run(self, batch: Any) -> Any:
        """Run it."""


class PlannedPieces(Protocol):
    """Plans the graphs that a loss function, or the body of a loop, is made of."""

    @property
    def loss(self) -> Callable[[Any, Any], Any] | None:
        """The loss function as planned; None: there is a body."""

    @property
    def note(self) -> str:
        """What is planned; empty: nothing."""

    def plan_models(self) -> None:
        """Plan what the models do that the loss function calls, in place of that."""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Run a body inside of this."""


def refusal(error: Exception) -> CaptureError:
    """Return what stops a capture as a CaptureError; whatever else it was, torch or the user's objects raised it."""
    if isinstance(error, CaptureError):
        return error
    message = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    where = "planning" if isinstance(error, OllaError) else "capturing"
    found = CaptureError(f"{where} the step failed: {type(error).__name__}: {message[:300]}.")
    found.__cause__ = error
    return found


@dataclass(eq=False)
class Unplanned:
    """Runs what cannot be captured of a step.

    Args:
        model, loss: of the step.
        optimizers: of the step.
        body: the body of the user's own loop, of a batch; None: there is none.
        way: one of WAYS.
        size: how many kinds of batches may be refused; all that come later are not tried at all.

    Attributes:
        num_steps: calls that ran as the ordinary step, planned in pieces or not at all.
        inner: plans forward and backward where the update cannot be captured; None: there is no such step.
        pieces: plans what is no single graph; None: nothing is planned in pieces.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Callable[[Any, Any], Any] | None
    body: Callable[[Any], Any] | None
    way: str
    size: int
    num_steps: int = field(default=0, init=False)
    inner: Any = field(default=None, init=False)
    pieces: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"on_unsupported is {self.way!r}, expected 'warn' or 'raise'")
        self.forget()

    def forget(self) -> None:
        """Try again to capture what was refused."""
        self.inner = self.pieces = None
        self._keys: list[_Key] = []  # of batches that were refused
        self._inner_keys: list[_Key] = []  # of those, the ones whose forward and backward are planned
        self._reasons: list[str] = []
        self._had_first = False  # an ordinary first step was taken because a capture asked for it

    def takes(self, key: _Key) -> bool:
        """Whether a batch with this key is known to be refused."""
        return key in self._keys or len(self._keys) >= self.size

    def refuse(
        self,
        error: Exception,
        key: _Key,
        batch: Any,
        make_inner: Callable[[], Inner] | None = None,
        make_pieces: Callable[[], PlannedPieces] | None = None,
    ) -> Any:
        """Run a step that cannot be captured, and say so once.

        Args:
            error: what stopped the capture.
            key: of the batch.
            batch: the batch.
            make_inner: makes a step that plans forward and backward, and leaves gradients; None: there is no such step.
            make_pieces: makes what plans the pieces that are left then; None: nothing can.

        Raises:
            CaptureError: that is what the user asked for, or the ordinary step would fail as well.
        """
        found = refusal(error)
        if self.way == "raise" or found.rule in (MISUSE, SPENT):
            if found is not error:
                found.add_note("on_unsupported='warn' runs it as the ordinary step.")
            raise found
        free_frames(found, sys.exception())
        if found.rule == FIRST_STEP and not self._had_first:
            self._had_first = True
            return self.run(key, batch)
        is_split = make_inner is not None and self._splits(batch, make_inner)
        if not is_split and self.pieces is None and make_pieces is not None:
            self.pieces = make_pieces()
        self._keys.append(key)
        if is_split:
            self._inner_keys.append(key)
        try:
            result = self.run(key, batch)
        except Exception as raised:  # the ordinary step fails as well: on another batch it may be captured
            self._keys.remove(key)
            raised.add_note(f"Before it ran as the ordinary step, it could not be captured: {found}")
            raise
        if self.pieces is not None and not self.pieces.note and self.pieces.loss is not self.loss:
            self.pieces.plan_models()  # from the next step on
        if not self._reasons:
            what = "runs as the ordinary one, unplanned"
            if is_split:
                what = "is planned without its update, which runs as it is"
            elif self.pieces is not None:
                what = "runs as the ordinary one, planned in pieces"
                what += "" if self.pieces.note else " where that can be done"
            warnings.warn(
                f"the step {what}: {str(found).rstrip('.')}. "
                "After a change, step.recapture() tries again; on_unsupported='raise' makes this an error.",
                stacklevel=5,
            )
        if str(found) not in self._reasons:
            self._reasons.append(str(found))
        return result

    def _splits(self, batch: Any, make_inner: Callable[[], Inner]) -> bool:
        """Plan forward and backward without the update, if that can be done; return whether it could."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inner, handled = self.inner or make_inner(), sys.exception()
        try:
            inner.prepare(batch)
        except Exception as error:  # the reason that was found first is the one that is told
            free_frames(error, handled)
            return False
        self.inner = inner
        return True

    def run(self, key: _Key, batch: Any) -> Any:
        """Run a step that is not captured."""
        inner, found = self.inner, []
        if inner is not None and key in self._inner_keys:

            def forward_backward() -> Any:
                found.append(inner.run(batch))
                return first_of(found[-1])

            update(self.optimizers, forward_backward)
            return found[0]
        self.num_steps += 1
        with calls.unplanned():
            if self.pieces is None or key not in self._keys:
                return run_step(self.model, self.optimizers, self.loss, self.body, batch)
            with self.pieces.running():
                return run_step(self.model, self.optimizers, self.pieces.loss, self.body, batch)

    @property
    def note(self) -> str:
        """What a report says of it; empty where all was captured."""
        if not self._reasons:
            return ""
        reasons = " ".join(self._reasons[:_MAX_REASONS])
        pieces = self.pieces.note if self.pieces is not None else ""
        how = f"planned in pieces: {pieces}" if pieces else "unplanned."
        return f"{self.num_steps} steps ran as the ordinary one, {how} What could not be captured: {reasons}"

    def report(self) -> StepReport:
        """Return the report of a step of which nothing was planned."""
        held = [*self.model.parameters(), *self.model.buffers()]
        return StepReport(
            name=type(self.model).__name__,
            num_ops=0,
            num_steps=self.num_steps,
            num_ordinary_steps=self.num_steps,
            num_captures=0,
            in_arena=False,
            planned_peak_bytes=0,
            eager_peak_bytes=0,
            resident_bytes=sum(t.nbytes for t in held),
            seconds_per_step=None,
            capture_seconds=0.0,
            plan_seconds=0.0,
            note=self.note,
        )
