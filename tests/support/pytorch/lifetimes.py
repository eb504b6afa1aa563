"""A fixture of tests of steps: batch, stand-ins and graph of a capture end with it, and so does its device memory.

Beside it, a step that is captured for many shapes, and what the process has on its heap meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import olla  # noqa: E402
from olla.pytorch import step as steps  # noqa: E402
from tests.support.pytorch.steps import nn, square  # noqa: E402


def collect() -> None:
    """Collect until nothing is left: a cycle through tensors in C++ ends only in the pass after theirs."""
    while gc.collect():
        pass


def device_bytes() -> int:
    """Return the device memory that tensors take, without what libraries keep of it; 0 where there is no device."""
    if not torch.cuda.is_available():
        return 0
    collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    allocated: int = torch.cuda.memory_allocated()
    return allocated


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Lifetimes:
    """Weak references to what captures of steps are made of."""

    def __init__(self, kept: Callable[[], Iterable[Any]] = tuple) -> None:
        self._kept = kept  # values that outlive the test
        self._watched: list[tuple[weakref.ref[Any], str, weakref.ref[Any]]] = []  # step, what it is, the thing itself
        self._device_bytes = device_bytes()

    def watch(self, step: Any, batch: Any, captured: Any) -> None:
        """Watch the batch that a step was captured with, the graph, and the mode of its stand-ins."""
        graph = captured.module.graph
        values = (node.meta.get("val") for node in graph.nodes)
        modes = {id(v.fake_mode): v.fake_mode for v in values if hasattr(v, "fake_mode")}
        kept = {id(leaf) for leaf in _tensors(list(self._kept()))}
        leaves = [leaf for leaf in _tensors(batch) if id(leaf) not in kept]
        for what, things in (("batch", leaves), ("graph", [graph]), ("mode of stand-ins", modes.values())):
            self._watched += [(weakref.ref(step), what, weakref.ref(thing)) for thing in things]

    def alive(self, what: str) -> int:
        """Return how many of these are alive: "batch", "graph" or "mode of stand-ins"."""
        collect()
        return sum(thing() is not None for _, kind, thing in self._watched if kind == what)

    def check(self) -> None:
        """Require that nothing outlives its step: neither what a capture is made of, nor memory of the device."""
        if not self._watched:
            return
        collect()
        left = [what for step, what, thing in self._watched if step() is None and thing() is not None]
        assert not left, f"outlives its step: {', '.join(left)}"
        if all(step() is None for step, *_ in self._watched):
            more = device_bytes() - self._device_bytes
            assert more <= 0, f"{more} bytes of device memory outlive a step"


@pytest.fixture
def lifetimes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lifetimes]:
    """What the steps of a test are made of, all of it gone when the test has returned."""
    watched = Lifetimes(lambda: (*request.node.funcargs.values(), *vars(request.module).values()))  # its own arguments
    make = steps.Step._captured

    def captured(step: steps.Step, batch: Any) -> Any:
        made = make(step, batch)
        watched.watch(step, batch, made)
        return made

    monkeypatch.setattr(steps.Step, "_captured", captured)
    failed = request.session.testsfailed
    yield watched
    if request.session.testsfailed == failed:  # else the traceback holds the test's variables
        watched.check()


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
