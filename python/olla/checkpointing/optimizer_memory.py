"""Memory that an optimizer needs in addition to forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from olla.errors import CaptureError
from olla.fit.caching import most_bytes
from olla.fit.updates import update_of
from olla.pytorch.sharded.fully import local


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes beside forward and backward.

    Attributes:
        state: of the optimizer.
        update: that its step takes at once beside gradients and state.
    """

    state: int = 0
    update: int = 0

    def needed(self, memory: Any) -> int:
        """Return what a measured step needs with the optimizer."""
        return max(self.state + int(memory.peak_bytes), self.least(memory))

    def least(self, memory: Any) -> int:
        """Return what the optimizer's step needs."""
        return self.state + int(memory.live_bytes) + self.update


def optimizer_memory(optimizer: torch.optim.Optimizer | None, *, on_gpu: bool) -> OptimizerMemory:
    """Return what an optimizer needs; of one that has no state yet, what its first step makes.

    Raises:
        CaptureError: that is not known; the message says what to do.
    """
    if optimizer is None:
        return OptimizerMemory()
    update = update_of(optimizer, on_gpu=on_gpu)
    if update is None:
        raise CaptureError(
            f"what a step of {type(optimizer).__name__} takes is not known: leave optimizer=... out, and take what it "
            "needs off the budget"
        )
    present = [t for entries in optimizer.state.values() for t in entries.values() if isinstance(t, torch.Tensor)]
    state = sum(local(t).nbytes for t in present) if present else sum(update.state_bytes)
    return OptimizerMemory(state, most_bytes(update.requests))
