"""The device memory of a process whose batches have ever other shapes."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

from tests.cuda.standin import Standin  # noqa: E402
from tests.support.pytorch.lifetimes import CACHE_SIZE, captured_often, collect, device_bytes  # noqa: E402


def taken() -> tuple[int, int]:
    collect()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.slow
def test_device_memory_does_not_grow_over_200_captures_and_ends_with_the_step(
    standin: Standin | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later batch is larger than the first, nor is its arena; the step ends with the loop that yields."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest keeps what it logs
    before = device_bytes()
    found = list(captured_often("cuda", taken))
    first, later = found[:CACHE_SIZE], found[CACHE_SIZE:]
    assert max(later) <= max(first), found
    assert {reserved for _, reserved in later} == {first[-1][1]}, found
    assert device_bytes() == before
