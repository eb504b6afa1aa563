"""Tests of CUDA run on a GPU, or under the stand-in for one (standin.py), where torch is a CUDA build."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from olla.pytorch.memory.replay import Replay, load  # noqa: E402
from tests.cuda.standin import Standin, with_numbers  # noqa: E402
from tests.support.pytorch.lifetimes import lifetimes  # noqa: E402, F401

_FOLDER = Path(__file__).parent
_ABSENT = "no GPU, and no stand-in for one: see tests/cuda/standin.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where there is no device."""
    here = [item for item in items if _FOLDER in item.path.parents]
    is_absent = bool(here) and not torch.cuda.is_available()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if is_absent:
            item.add_marker(pytest.mark.skip(reason=_ABSENT))


@pytest.fixture(autouse=True)
def _nothing_outlives(standin: Standin | None, lifetimes: object) -> None:  # noqa: F811
    """Let no test leave anything of a step behind, device memory included."""


@pytest.fixture(scope="session")
def standin() -> Standin | None:
    """The stand-in, with numbers for torch's operators; None on a GPU."""
    return with_numbers()


@pytest.fixture(params=["late", "early", "random:7"])
def device(request: pytest.FixtureRequest, standin: Standin | None) -> Iterator[torch.device]:
    """The device, with work that is not finished before it must be; on a GPU once, as it comes."""
    if standin is None and request.param != "late":
        pytest.skip("a GPU has its own schedule")
    if standin is not None:
        standin.schedule(request.param)
    yield torch.device("cuda")
    torch.cuda.synchronize()
    if standin is not None:
        standin.schedule("now")
        assert standin.without_numbers() == []


@pytest.fixture
def faults(standin: Standin | None) -> Standin:
    """The stand-in, for what only it can do."""
    if standin is None:
        pytest.skip("needs the stand-in")
    return standin


@pytest.fixture
def replay(standin: Standin | None) -> Iterator[Replay]:
    """The allocator of the GPU, for tests that make their tensors on whatever the default device is."""
    planned = load(torch.device("cuda"))
    while gc.collect():
        pass
    torch.set_default_device("cuda")
    before = planned.held_bytes
    yield planned
    torch.set_default_device(None)
    planned.abandon()  # what a test that failed left open would fail all that follow
    planned.release()
    while gc.collect():
        pass
    assert planned.held_bytes <= before
