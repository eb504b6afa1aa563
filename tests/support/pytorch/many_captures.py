"""Steps that are captured for many shapes in one process, and what the process has of memory meanwhile."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import olla
from tests.support.pytorch.lifetimes import collect
from tests.support.pytorch.steps import nn, square, torch

NUM_CAPTURES, CACHE_SIZE = 200, 4


class _Heap(ctypes.Structure):
    """What mallinfo2 returns; of its ten numbers 7 is what is in use, and 4 what lies in mappings of its own."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def heap_bytes() -> int:
    """Return what all of the process has taken from glibc's heap and not given back; unlike pages, it has no gaps."""
    collect()
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs glibc 2.33 or later")
    library.mallinfo2.restype = _Heap
    found = library.mallinfo2().numbers
    return int(found[7] + found[4])


def captured_often(device: str, measure: Callable[[], Any], often: int = NUM_CAPTURES) -> Iterator[Any]:
    """Train a step on batches of as many sizes, the largest first; yield what `measure` says after each of them.

    No operator of the model is one of oneDNN, which keeps what it made for a shape, in an ordinary loop too.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(
        model, optimizer=optimizer, loss=square, disk_cache=False, time_limit=0.2, cache_size=CACHE_SIZE
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step needed more than")
        for number in range(often):
            batch = torch.randn(often - number, 16, device=device)
            for _ in range(3):
                step(batch)
            del batch
            yield measure()
    assert len(step._captures) == CACHE_SIZE
