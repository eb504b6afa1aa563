"""Tables of planned requests, and tensors made in the windows of their ops."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from olla.pytorch.memory.replay import Replay, Table  # noqa: E402


def table(requests: Sequence[Sequence[tuple[int, int]]], arena_bytes: int) -> Table:
    """Return the table in which op v makes requests[v]: (bytes, offset)."""
    op_offset = np.cumsum([0, *map(len, requests)], dtype=np.int64)
    flat = np.array([request for op in requests for request in op], np.int64).reshape(-1, 2)
    return Table(arena_bytes, op_offset, flat[:, 0].copy(), flat[:, 1].copy())


def slot() -> int:
    """Return what addresses on the default device are multiples of."""
    return 64 if torch.get_default_device().type == "cpu" else 512


def slots(requests: Sequence[Sequence[tuple[int, int]]], num_slots: int) -> Table:
    """Return a table for the default device with offsets and the size of the arena in its slots."""
    size = slot()
    scaled = [[(num_bytes, at if at < 0 else at * size) for num_bytes, at in op] for op in requests]
    return table(scaled, num_slots * size)._replace(alignment=size)


def record(replay: Replay, num_ops: int) -> None:
    """Record a step on the default device of which nothing is planned."""
    replay.activate(slots([[]] * num_ops, 0), recording=True)


def ones(replay: Replay, op: int, *counts: int) -> list[torch.Tensor]:
    """Make a tensor of each count of floats in the window of an op."""
    replay.begin(op)
    try:
        return [torch.ones(count) for count in counts]
    finally:
        replay.end()


def offset(replay: Replay, tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr()) - replay.arena[0]


def in_arena(replay: Replay, tensor: torch.Tensor) -> bool:
    return 0 <= offset(replay, tensor) < replay.arena[1]


def process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
