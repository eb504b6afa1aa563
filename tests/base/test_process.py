"""The most that the process had resident, before and since a moment."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from olla.base import process
from olla.base.process import ProcessPeak

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts anew")
SIZE = 64 << 20


def touch() -> None:
    np.ones(SIZE // 8)


@linux
def test_what_was_freed_before_the_moment_counts_before_and_what_comes_after_it_after() -> None:
    touch()
    peak = ProcessPeak()
    assert (peak.before_bytes, peak.since_bytes) == (None, None)
    peak.begin()
    low = peak.since_bytes
    assert low is not None
    assert peak.before_bytes is not None
    assert peak.before_bytes > low + SIZE // 2
    touch()
    assert peak.since_bytes is not None
    assert peak.since_bytes > low + SIZE // 2


@linux
def test_another_moment_takes_nothing_from_the_first_one() -> None:
    first, second = ProcessPeak(), ProcessPeak()
    first.begin()
    touch()
    high = first.since_bytes
    second.begin()
    assert high is not None
    assert first.since_bytes is not None
    assert second.since_bytes is not None
    assert first.since_bytes >= high > second.since_bytes


def test_where_the_system_cannot_count_anew_only_the_peak_so_far_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(process, "_CLEAR", tmp_path / "no folder" / "clear_refs")
    peak = ProcessPeak()
    peak.begin()
    assert peak.before_bytes is not None
    assert peak.before_bytes > SIZE // 64
    assert peak.since_bytes is None
