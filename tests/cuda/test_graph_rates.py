"""Rates that a schedule changes, behind a CUDA graph: on the device where the step computes with them as tensors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from olla.errors import ReplayError  # noqa: E402
from olla.pytorch.program import cudagraph  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.cuda.test_graphs import compiled, ordinary, same, steps, trained, world_of  # noqa: E402
from tests.support.pytorch.steps import World  # noqa: E402

MOVE = ("adam", "nadam")  # capturable: nothing takes the rate as a number
NUM_STEPS = 12


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with every capture of a graph."""
    found: list[None] = []
    capture = cudagraph.capture

    def counted(*arguments: Any) -> Any:
        found.append(None)
        return capture(*arguments)

    monkeypatch.setattr(cudagraph, "capture", counted)
    return found


def scheduled(world: World, step: Callable[[Any], Any], epoch: int = 1) -> Callable[[Any], Any]:
    """Take steps whose rate changes after every `epoch` of them."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(world.optimizer, gamma=0.7)
    calls = iter(range(NUM_STEPS))

    def call(batch: Any) -> Any:
        loss = step(batch)
        if next(calls) % epoch == epoch - 1:
            schedule.step()
        return loss

    return call


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("optimizer", MOVE)
def test_a_rate_that_changes_moves_to_the_device(
    device: torch.device, captures: list[None], optimizer: str, arena: bool
) -> None:
    expected, world = world_of(optimizer), world_of(optimizer)
    step = compiled(world, cuda_graph=True, arena=arena)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(world, scheduled(world, step), steps(NUM_STEPS))
    for value, other in zip(
        found, trained(expected, scheduled(expected, ordinary(expected)), steps(NUM_STEPS)), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6)  # float32, as torch's own rates in tensors
    assert len(captures) == 2


def test_a_rate_that_stays_is_a_constant(device: torch.device, captures: list[None]) -> None:
    world = world_of("adam")
    trained(world, compiled(world, cuda_graph=True), steps(NUM_STEPS))
    assert len(captures) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_a_rate_that_cannot_move_is_told_once(device: torch.device, captures: list[None], optimizer: str) -> None:
    """These take it as a number, `alpha` or `value`: the graph is captured for every change, right as ever."""
    expected, world = world_of(optimizer), world_of(optimizer)
    step = compiled(world, cuda_graph=True)
    with pytest.warns(UserWarning, match=r"captured anew for every change of a learning rate.*capturable") as told:
        found = trained(world, scheduled(world, step, 3), steps(NUM_STEPS))
    assert same(found, trained(expected, scheduled(expected, ordinary(expected), 3), steps(NUM_STEPS)))
    assert len(told) == 1
    assert len(captures) > 2


def test_the_advice_for_rates_that_cannot_move_works(device: torch.device, captures: list[None]) -> None:
    world = world_of("tensor rate")
    step = compiled(world, cuda_graph=True)

    def call(batch: Any) -> Any:
        world.optimizer.param_groups[0]["lr"].mul_(0.7)
        return step(batch)

    trained(world, call, steps(NUM_STEPS))
    assert len(captures) == 1


def test_a_tensor_at_another_address_is_seen(device: torch.device) -> None:
    values = [torch.empty(4, device="cuda") for _ in range(500)]
    all_of_them = cudagraph.Addresses(values, range(500))
    others = cudagraph.Addresses(values, range(499))
    assert all_of_them.are_those_of(values)
    values[499].data = torch.empty(4, device="cuda")
    assert not all_of_them.are_those_of(values)
    assert others.are_those_of(values)
    torch.utils.swap_tensors(values[0], values[499])  # the objects are those of before
    assert not others.are_those_of(values)


def test_a_look_at_500_addresses_takes_less_than_20_microseconds(faults: Standin) -> None:
    """It is part of every replay; a loop in Python takes more, the best of many tries included."""
    values = [torch.empty(4, device="cuda") for _ in range(500)]
    there = cudagraph.Addresses(values, range(500))
    times = []
    for _ in range(500):
        start = time.perf_counter()
        assert there.are_those_of(values)
        times.append(time.perf_counter() - start)
    assert min(times) < 20e-6


def test_without_a_compiler_addresses_are_compared_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise ReplayError("no compiler")

    monkeypatch.setattr(cudagraph, "load_module", refuse)
    values = [torch.empty(4, device="cuda") for _ in range(3)]
    there = cudagraph.Addresses(values, range(3))
    assert there.are_those_of(values)
    values[2].data = torch.empty(4, device="cuda")
    assert not there.are_those_of(values)
