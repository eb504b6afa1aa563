"""Steps that swap: the same numbers to the bit, memory as planned, host memory within its budget, whatever fails."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import olla
from olla import rewriting
from olla.plan import Costs, Link
from olla.pytorch.memory import copies
from olla.pytorch.memory.requests import with_costs
from olla.swap import autoswap, choose
from tests.support.pytorch.failing import Saved, fail, failing, no_memory
from tests.support.pytorch.planned import planned, require_as_planned, runner_of, train, unbudgeted, world_of
from tests.support.pytorch.steps import World, nn, num_interrupted, printed_by_two_processes, same, square, torch

pytestmark = pytest.mark.torch

MODELS = [
    ("gpt2", "adamw"),
    ("bert_base", "momentum"),
    ("resnet50", "momentum"),
    ("unet", "adamw"),
    ("llama_1b", "adamw"),
]
FAST = Link(out_bytes_per_second=1e12, in_bytes_per_second=1e12, out_latency_seconds=0.0, in_latency_seconds=0.0)


@pytest.fixture(autouse=True)
def small_tensors_are_swapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MIN_BYTES", 512)
    monkeypatch.setattr(autoswap, "_MIN_BYTES", 512)


@pytest.fixture
def estimated_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth swapping does not depend on how busy the machine is."""

    def with_estimates(graph: olla.Graph, recorded: Any, seconds: Any, alignment: int) -> olla.Graph:
        return with_costs(graph, recorded, olla.graph.PROFILES["cpu"].op_seconds(graph), alignment)

    monkeypatch.setattr("olla.pytorch.runner.with_costs", with_estimates)


@pytest.mark.usefixtures("estimated_times")
@pytest.mark.parametrize(("name", "optimizer"), MODELS)
def test_five_steps_with_swaps_are_those_without_to_the_bit(name: str, optimizer: str) -> None:
    plain, values = unbudgeted(name, optimizer)
    ways: list[dict[str, Any]] = [{"swap": True, "max_slowdown": 0.1}, {"swap": True}, {"method": "autoswap"}]
    for options in ways:
        step, swapped = train(world_of(name, optimizer), link=FAST, **options)
        assert same(swapped, values)
        report = step.report()
        require_as_planned(report)
        assert report.swap.num_swaps == len(step.plan.swapped.swaps.tensor)
        # Behind recomputation, nothing is left to swap in the ResNet: its peak is the memory of one op.
        assert report.swap.num_swaps > 0 or (name, "swap" in options) == ("resnet50", True)
        assert (report.swap.host_bytes > 0) == (report.swap.num_swaps > 0)
        assert "host memory" in str(report)
        needed = report.resident_bytes + report.output_bytes + report.arena_bytes
        assert needed <= options.get("budget", needed)
        if options is ways[0]:
            ways[1]["budget"] = (plain.planned_peak_bytes + max(needed, report.planned_peak_bytes)) // 2
        assert report.planned_peak_bytes < plain.planned_peak_bytes or "method" in options
        captured = runner_of(step)._captured.graph
        olla.check(captured, rewriting.with_costs(step.plan, Costs.of(captured), captured))


def test_host_memory_stays_within_its_budget() -> None:
    free, values = train(world_of("gpt2", "momentum"), link=FAST, method="autoswap")
    most = free.report().swap.host_bytes // 2
    step, bounded = train(world_of("gpt2", "momentum"), link=FAST, method="autoswap", host_budget=most)
    assert same(bounded, values)
    report = step.report()
    assert 0 < report.swap.host_bytes <= report.swap.host_budget_bytes == most
    assert len(step._host._memory) == report.swap.host_bytes
    memory = weakref.ref(step._host._memory.untyped_storage())
    step.release()
    assert memory() is None
    assert len(planned(world_of("gpt2", "momentum"), step, 1)) == 1


def test_without_an_arena_the_numbers_are_the_same() -> None:
    step, values = train(world_of("gpt2", "momentum"), link=FAST, method="autoswap", arena=False)
    assert same(values, unbudgeted("gpt2", "momentum")[1])
    graph = runner_of(step)._captured.graph
    estimated = float(olla.graph.PROFILES["cpu"].op_seconds(graph).sum())
    assert step.plan.swapped.swaps.base_seconds != pytest.approx(estimated, rel=1e-6)
    assert step.report().swap.num_swaps > 0


class Deep(nn.Module):
    """Layers whose activations wait for the backward pass, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def deep() -> World:
    torch.manual_seed(0)
    model = Deep()
    return World(model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(64, 64), square)


def swapping(**options: Any) -> tuple[World, Any]:
    """A step that swaps, in its arena."""
    world = deep()
    goal = {"method": "autoswap"} | options
    step = olla.compile(
        world.model, optimizer=world.optimizer, loss=square, link=FAST, time_limit=0.5, disk_cache=False, **goal
    )
    planned(world, step, 4)
    assert step.report().swap.num_swaps > 0
    require_as_planned(step.report())
    return world, step


def test_what_comes_back_lies_at_a_planned_address_of_its_own() -> None:
    world, step = swapping()
    runner = runner_of(step)
    left: dict[int, int] = {}
    came: dict[int, int] = {}
    arena: list[int] = []
    constants = runner.program.__globals__
    out, back = constants["out"], constants["back"]

    def noted_out(swap: int, value: Any) -> None:
        left[swap] = value.untyped_storage().data_ptr()
        arena[:] = runner._replay.arena
        out(swap, value)

    def noted_back(swap: int) -> Any:
        memory = back(swap)
        came[swap] = memory.data_ptr()
        return memory

    constants.update(out=noted_out, back=noted_back)
    step(world.batch)
    assert left.keys() == came.keys() == set(range(step.report().swap.num_swaps))
    assert all(arena[0] <= address < arena[0] + arena[1] for address in (*left.values(), *came.values()))
    assert any(left[swap] != came[swap] for swap in left)


def test_copies_that_take_their_time_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = train(deep())
    run, delay = copies._Copy.run, random.Random(3)

    def late(copy: Any) -> None:
        time.sleep(delay.choice([0.0, 0.002, 0.01]))
        run(copy)

    monkeypatch.setattr(copies._Copy, "run", late)
    step, swapped = train(deep(), link=FAST, method="autoswap")
    assert same(swapped, values)
    require_as_planned(step.report())
    assert step.report().swap.measured_stall_seconds > 0.01


def test_copies_are_planned_anew_with_measured_seconds_once() -> None:
    world = deep()
    step = olla.compile(
        world.model, optimizer=world.optimizer, loss=square, swap=True, minimise="peak", link=FAST, time_limit=0.5
    )
    step(world.batch)
    runner = runner_of(step)
    graph = runner._captured.graph
    assert (graph.seconds == 0).all()
    estimated = float(olla.graph.PROFILES["cpu"].op_seconds(graph).sum())
    assert step.plan.base_seconds != pytest.approx(estimated, rel=1e-6)
    chosen = step.plan.swapped.swaps
    planned(world, step, 3)
    assert step.plan.swapped.swaps is chosen


@pytest.mark.parametrize(
    ("failure", "error", "after"),
    [
        (fail(RuntimeError), RuntimeError, False),
        (fail(KeyboardInterrupt), KeyboardInterrupt, True),
        (no_memory, RuntimeError, False),
    ],
    ids=["error", "interrupt", "no memory"],
)
def test_a_failure_in_every_op_and_copy_leaves_later_steps_correct(failure: Any, error: Any, after: bool) -> None:
    world, step = swapping()
    saved = Saved(world, step)
    program = runner_of(step).program
    with failing(program, -1, failure) as num_calls:
        step(world.batch)
    with copies_failing(program, -1, failure, after) as num_copies:
        step(world.batch)
    assert num_copies[0] >= 4 * step.report().swap.num_swaps
    points = [(failing, call) for call in range(0, num_calls[0], 3)]
    points += [(copies_failing, call) for call in range(num_copies[0])]
    for inject, call in points:
        with inject(program, call, failure, after), pytest.raises(error):
            step(world.batch)
        saved.check()


@contextmanager
def copies_failing(program: Any, call: int, failure: Any, after: bool) -> Iterator[list[int]]:
    """Let the call of this number that a program makes to its copies fail, before or after it had its effect."""
    constants = program.__globals__
    functions = {name: constants[name] for name in ("out", "back", "wait")}
    num_calls = [0]

    def wrapped(function: Any) -> Any:
        def run(*args: Any) -> Any:
            num_calls[0] += 1
            if num_calls[0] - 1 == call and not after:
                failure()
            result = function(*args)
            if num_calls[0] - 1 == call:
                failure()
            return result

        return run

    constants.update({name: wrapped(function) for name, function in functions.items()})
    try:
        yield num_calls
    finally:
        constants.update(functions)


def test_interrupts_at_any_moment_leave_later_steps_correct() -> None:
    world, step = swapping()
    saved = Saved(world, step)
    start = time.perf_counter()
    for _ in range(10):
        step(world.batch)
    seconds = (time.perf_counter() - start) / 10
    assert num_interrupted(60, 1.1 * seconds, lambda: step(world.batch), saved.check) > 5


def test_without_host_memory_the_step_says_so_and_runs_later() -> None:
    world, step = swapping()
    saved = Saved(world, step)
    step.release()
    held = runner_of(step)._planned.copies
    host_bytes, held.host_bytes = held.host_bytes, 1 << 60
    with pytest.raises(olla.ReplayError, match="host memory for swapping"):
        step(world.batch)
    held.host_bytes = host_bytes
    saved.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap": True}, "swap is for a goal"),
        ({"host_budget": "1GB"}, "host_budget is for a goal"),
        ({"method": "ilp"}, "method is 'ilp'"),
        ({"method": "autoswap", "link": 0.0}, "of a link is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_the_first_call(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        olla.compile(nn.Linear(2, 2), loss=square, **options)


CHILD = """
import torch, olla
from torch import nn

torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3))]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = lambda model, x: model(x).square().mean()
step = olla.compile(model, optimizer=optimizer, loss=loss, method="autoswap", link=1e12, time_limit=0.5)
batch = torch.randn(8192, 64)
losses = [float(step(batch)).hex() for _ in range(5)]
report = step.report()
assert report.measured_peak_bytes == report.planned_peak_bytes and report.num_misses == 0
assert (report.record_seconds == 0) == report.cached, report.note
print(report.cached, report.swap.num_swaps, report.swap.host_bytes, report.planned_peak_bytes, losses)
"""


def test_a_later_process_finds_the_swaps_on_disk(tmp_path: Path) -> None:
    first, second = printed_by_two_processes(CHILD, tmp_path)
    assert (first[0], second[0]) == ("False", "True")
    assert first[1] == second[1]
