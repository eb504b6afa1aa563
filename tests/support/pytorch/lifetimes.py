"""A fixture of tests of steps: batch, stand-ins and graph of a capture end with it, and so does its device memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from olla.pytorch import step as steps  # noqa: E402


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
