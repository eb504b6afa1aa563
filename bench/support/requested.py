"""What an ordinary loop on the CPU requests for memory: recorded, with and without the workspaces of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from olla.pytorch.memory.replay import Table, load

_MOST_OPS = 200_000  # of an iteration


class Requested(NamedTuple):
    """The most bytes of an iteration's requests alive at once; what was there before it does not count.

    Attributes:
        loop_bytes: of the loop as it is.
        bytes: of the loop with a window around every operator; the same, unless the windows change what it does.
        tensor_bytes: of these, without the requests that are freed before their operator ends.
        workspace_op: the operator at the peak, where its workspace is part of it; else empty.
    """

    loop_bytes: int
    bytes: int
    tensor_bytes: int
    workspace_op: str


class _Windows(TorchDispatchMode):
    """Open a window of the recording around every operator."""

    def __init__(self, replay: Any) -> None:
        super().__init__()
        self.names: list[str] = []
        self._replay = replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._replay.begin(len(self.names))
        self.names.append(str(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._replay.end()


def requested(iterate: Callable[[], object], clear: Callable[[], object]) -> Requested:
    """Record an iteration of a loop twice.

    Args:
        iterate: one iteration: zero_grad, loss, backward, update.
        clear: zero_grad, called before each recording.
    """
    for _ in range(2):  # the optimizer makes its state, libraries fill their caches
        iterate()
    clear()
    replay = load(torch.device("cpu"))
    replay.open_loop()
    replay.begin(0)
    iterate()
    replay.end()
    one = replay.iteration(0)
    replay.close_loop()
    whole = _live(one.num_bytes, np.where(one.freed_at >= 0, one.freed_at - one.start, -1))
    clear()
    none = np.zeros(0, dtype=np.int64)
    replay.activate(Table(0, np.zeros(_MOST_OPS + 1, dtype=np.int64), none, none), recording=True)
    try:
        with _Windows(replay) as windows:
            iterate()
    finally:
        recorded = replay.stop_recording()
    clear()
    ends = np.searchsorted(recorded.op, recorded.op, side="right")
    inside = (recorded.freed_in == recorded.op) & (recorded.freed_at >= 0) & (recorded.freed_at <= ends)
    live = _live(recorded.num_bytes, recorded.freed_at)
    tensors = _live(np.where(inside, 0, recorded.num_bytes), recorded.freed_at)
    at = int(live.argmax())
    has_workspace = live[at] > tensors[at]
    name = windows.names[recorded.op[at]] if has_workspace else ""
    return Requested(int(whole.max()), int(live.max()), int(tensors.max()), name)


def _live(num_bytes: NDArray[np.int64], freed_at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes alive at every request, that one included; `freed_at` requests had been made at its end."""
    change = np.append(num_bytes, 0)
    freed = freed_at >= 0
    np.subtract.at(change, freed_at[freed], num_bytes[freed])
    live: NDArray[np.int64] = np.cumsum(change)
    return live
