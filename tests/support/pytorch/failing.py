"""Failures of every kind inside a step, and what must hold of the steps after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.pytorch.planned import planned, reference, runner_of
from tests.support.pytorch.steps import World, same, torch


def fail(error: type[BaseException]) -> Callable[[], None]:
    def raise_it() -> None:
        raise error("injected")

    return raise_it


def no_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


@contextmanager
def failing(program: Any, call: int, failure: Callable[[], None], after: bool = False) -> Iterator[list[int]]:
    """Let the call of this number that a program makes to an operator fail, before or after its kernel ran."""
    constants = program.__globals__
    kernels = {n: f for n, f in constants.items() if n[0] == "c" and n[1:].isdigit() and callable(f)}
    num_calls = [0]

    def wrapped(kernel: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            num_calls[0] += 1
            if num_calls[0] - 1 == call and not after:
                failure()
            result = kernel(*args, **kwargs)
            if num_calls[0] - 1 == call and after:
                failure()
            return result

        return run

    constants.update({name: wrapped(kernel) for name, kernel in kernels.items()})
    try:
        yield num_calls
    finally:
        constants.update(kernels)


class Saved:
    """A state of a world to come back to, and what two steps from there give."""

    def __init__(self, world: World, step: Any) -> None:
        self._world, self._step = world, step
        self._state = world.copy()
        twin = world.copy()
        self._losses = reference(twin, step, 2)
        self._values = twin.values()

    def restore(self) -> None:
        self._world.model.load_state_dict(self._state.model.state_dict())
        self._world.optimizer.load_state_dict(self._state.copy().optimizer.state_dict())

    def check(self) -> None:
        """Later steps are right, to the bit, and at their planned addresses."""
        replay = runner_of(self._step)._replay
        assert replay.arena == (0, 0)
        assert torch.is_grad_enabled()
        self.restore()
        assert same(planned(self._world, self._step, 2), self._losses)
        assert same(self._world.values(), self._values)
        report = self._step.report()
        assert report.misses == ()
        assert report.measured_peak_bytes in (None, report.planned_peak_bytes)
