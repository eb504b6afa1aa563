"""The memory of a process whose batches have ever other shapes."""

from __future__ import annotations

import logging

import pytest

from tests.support.pytorch.lifetimes import captured_often, heap_bytes

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_the_heap_does_not_grow_over_200_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own notes of stand-ins take two KiB for each; a capture that stays would take 300."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest keeps what it logs
    numbers = iter(range(1000))
    found = [taken for taken in captured_often("cpu", lambda: heap_bytes() if next(numbers) % 20 == 19 else 0) if taken]
    assert len(found) == 10
    assert found[-1] - found[1] < 160 * 12 << 10, found
