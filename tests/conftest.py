"""Settings of every test."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ["OLLA_DISK_CACHE"] = "0"  # every test captures its own steps; those of the cache switch it on
settings.register_profile("olla", deadline=None)  # the first call of a kernel compiles it
settings.load_profile("olla")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, here and in processes that are started, even if a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
