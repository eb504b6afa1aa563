"""The captures of one step: which of them is still right for a call, by its batch and by its guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from olla._core import first_changed
from olla.errors import CaptureError
from olla.pytorch import feeds
from olla.pytorch.capture import Captured
from olla.pytorch.guards.guard import Guard, TensorFacts
from olla.pytorch.guards.values import MISSING

if TYPE_CHECKING:
    from olla.pytorch.runner import Runner

_UNREADABLE = (KeyError, IndexError, StopIteration, AttributeError, TypeError)


class Capture:
    """One capture, and what it is right for.

    Args:
        captured: the step.
        key: of the batch it was captured with.
        feed: finds its tensors.
        leaves: of the batch.

    Attributes:
        runner: runs it; set by the step.
    """

    runner: Runner

    def __init__(self, captured: Captured, key: tuple[Any, ...], feed: feeds.Feed, leaves: Sequence[Any]) -> None:
        assert captured.reads is not None
        self.key = key
        self.feed = feed
        self.sources = feed.sources(captured.inputs)
        self._settings = feeds.Settings(feed.optimizer) if feed.optimizer is not None else None
        self._guard = Guard(captured.reads, feed.tensors())
        self._states = [i for i, entry in enumerate(captured.inputs) if entry.kind == "optimizer_state"]
        values = self.sources(leaves)
        self._shared = self._guard.shared_with(leaves)
        self._state_facts = TensorFacts([values[i] for i in self._states])
        self._seen: list[Any] = [()]
        self._seen_tensors: list[Any] = [tuple(feed.tensors())]
        self._updated = feed.updated()
        _check_sharing(captured, values)

    def values(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], str]:
        """Return the tensors the step takes for a batch; or, in words, why this capture is not right any more.

        Args:
            leaves: of a batch with this key.

        Complexity: O(what the step read and takes).
        """
        try:
            tensors = self.feed.tensors()
            if what := self._guard.change(tensors):
                return [], what
            if first_changed([tensors], self._seen_tensors, MISSING, 0, None) >= 0:
                if self.feed.updated() != self._updated:
                    return [], "the optimizer updates other parameters of the model"
                self._seen_tensors = [tuple(tensors)]
            if self._settings is not None and (what := self._settings.change()):
                return [], what
            values = self.sources(leaves)
        except _UNREADABLE as error:
            return [], f"a parameter, a buffer or optimizer state is not where it was ({type(error).__name__}: {error})"
        state = [values[i] for i in self._states]
        if first_changed([state], self._seen, MISSING, 0, None) >= 0:
            if not all(isinstance(t, torch.Tensor) for t in state):
                return [], "the optimizer's state holds something else than tensors"
            if what := self._state_facts.change(state):
                return [], f"of the optimizer's state, {what}"
            self._seen = [tuple(state)]
        if self._shared != self._guard.shared_with(leaves):
            return [], "the batch shares memory with parameters or buffers in another way"
        return values, ""


class Captures:
    """The captures of a step, the latest used last.

    Args:
        size: how many to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._captures: list[Capture] = []

    def __len__(self) -> int:
        return len(self._captures)

    @property
    def latest(self) -> Capture | None:
        """The one that was used last."""
        return self._captures[-1] if self._captures else None

    def find(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[Capture | None, list[torch.Tensor], str]:
        """Return the capture that is right for a call, with its values, or why none is."""
        reason = ""
        for capture in reversed(self._captures):
            if capture.key != key:
                continue
            values, what = capture.values(leaves)
            if not what:
                return capture, values, ""
            reason = reason or what
        return None, [], reason or ("another batch, mode or setting of torch" if self._captures else "")

    def use(self, capture: Capture) -> bool:
        """Note that a capture was used; whether another one was dropped for it."""
        if self._captures and self._captures[-1] is capture:
            return False
        self._captures = [c for c in self._captures if c is not capture] + [capture]
        if len(self._captures) <= self._size:
            return False
        self._captures.pop(0)
        return True


def _check_sharing(captured: Captured, values: Sequence[torch.Tensor]) -> None:
    """Raise a CaptureError where the step changes a tensor that shares memory with another one it takes.

    Complexity: O(n log n + mutations).
    """
    nodes = [n for n in captured.module.graph.nodes if n.op == "placeholder"]
    changed = set(captured.graph.mutates.item.tolist())
    spans = []
    for entry, node, value in zip(captured.inputs, nodes, values, strict=True):
        if value.layout != torch.strided or value.numel() == 0:
            continue
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        start = value.storage_offset() * value.element_size()
        end = start + (last + 1) * value.element_size()
        is_changed = any(t in changed for t in captured.tensors[node])
        spans.append((value.untyped_storage()._cdata, start, end, id(value), is_changed, entry.name))
    spans.sort(key=lambda span: span[:3])
    before: tuple[Any, ...] | None = None  # the span of this storage that reaches furthest
    for span in spans:
        if before is not None and before[0] == span[0] and span[1] < before[2]:
            if before[3] != span[3] and (before[4] or span[4]):
                raise CaptureError(
                    f"{before[5]} and {span[5]} share memory, and the step changes it: no plan would know. "
                    "Copy one of them (.clone()) before the step."
                )
            before = (*before[:2], max(before[2], span[2]), before[3], before[4] or span[4], before[5])
        else:
            before = span
