"""The allocator of the CPU, with nothing left in it by other tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from olla.pytorch.memory.replay import Replay


def collect() -> None:
    """Collect until nothing is left: a cycle through tensors in C++ ends only in the pass after theirs."""
    while gc.collect():
        pass


@pytest.fixture
def replay() -> Iterator[Replay]:
    torch = pytest.importorskip("torch")
    from olla.pytorch.memory import replay as planned

    replay = planned.load(torch.device("cpu"))
    collect()
    before = replay.held_bytes
    yield replay
    replay.release()
    collect()
    # What other tests of this process left may end meanwhile: it counts for less, never for more.
    assert replay.held_bytes <= before
