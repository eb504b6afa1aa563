"""Ordinary training loops, run twice: with the model as it is, and wrapped; and what they allocate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import olla
from olla.inductor.compat import fallback
from olla.pytorch.memory.replay import Table, load
from tests.support.pytorch.steps import nn, torch

GOALS: dict[str, dict[str, Any]] = {"order": {}, "10 %": {"max_slowdown": 0.1}, "peak": {"minimise": "peak"}}
TIME_LIMIT = 0.3


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compile everything anew, on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fallback.forget()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield
    torch.compiler.reset()
    torch.set_num_threads(num_threads)


@dataclass
class Ended:
    """What is left behind a loop."""

    losses: list[Any]
    tensors: dict[str, Any]
    random_state: Any
    model: Any

    def differs_from(self, other: Ended) -> list[str]:
        """Return the names of what is not the same to the bit."""
        found = [f"loss {i}" for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)) if not same(a, b)]
        assert self.tensors.keys() == other.tensors.keys()
        found += [name for name, a in self.tensors.items() if not same(a, other.tensors[name])]
        return found + ([] if same(self.random_state, other.random_state) else ["random state"])


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors are of one kind and the same to the bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


Loop = Callable[[Any], list[Any]]  # runs a model's training, returns losses


def run(make: Callable[[], Any], loop: Loop, goal: dict[str, Any] | None = None) -> Ended:
    """Make a model and train it, wrapped for a goal or as it is."""
    torch.manual_seed(0)
    model = make()
    if goal is not None:
        assert olla.wrap(model, time_limit=TIME_LIMIT, **goal) is model
    torch.manual_seed(1)
    losses = loop(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Ended(losses, {name: t.detach() for name, t in tensors.items()}, torch.get_rng_state(), model)


def assert_same(make: Callable[[], Any], loop: Loop, goal: dict[str, Any], *, planned: bool = True) -> Any:
    """Check that a wrapped model trains as it does unwrapped, to the bit; return the report."""
    eager, wrapped = run(make, loop), run(make, loop, goal)
    differing = wrapped.differs_from(eager)
    assert not differing, differing
    report = olla.report_of(wrapped.model)
    assert bool(report.planned) == planned, str(report)
    return report


def accumulating(batches: Callable[[int], Any], loss: Callable[[Any, Any], Any], steps: int = 10) -> Loop:
    """Return a loop with two batches a step, clipping and AdamW."""

    def loop(model: Any) -> list[Any]:
        optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), []
        for i in range(steps):
            for k in range(2):
                found = loss(model, batches(2 * i + k)) / 2
                found.backward()
                losses.append(found.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return loop


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes of torch's allocator for the CPU in use at once in a call, of what it asks for itself."""
    replay = load(torch.device("cpu"))
    none = np.zeros(0, np.int64)
    replay.activate(Table(0, np.zeros(2, np.int64), none, none), recording=True)
    replay.begin(0)
    run()
    replay.end()
    recorded = replay.stop_recording()
    change = np.append(recorded.num_bytes, 0)
    ends = recorded.freed_at >= 0
    np.subtract.at(change, recorded.freed_at[ends], recorded.num_bytes[ends])
    return int(np.cumsum(change).max())
