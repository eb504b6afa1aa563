"""What goes wrong around a compiled step: exceptions anywhere, no memory, threads, forks, many steps."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olla
from olla.pytorch.cache import Place
from olla.pytorch.memory import arrange
from olla.pytorch.memory.requests import Requests
from tests.support.pytorch.failing import Saved, fail, failing, no_memory
from tests.support.pytorch.planned import compiled, planned, reference, runner_of, world_of

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.support.pytorch.steps import World, num_interrupted, same, square, topological  # noqa: E402
from tests.support.pytorch.windows import process_bytes  # noqa: E402

pytestmark = pytest.mark.torch


def ready(name: str = "mlp", optimizer: str = "adamw") -> tuple[World, Any, Saved]:
    world = world_of(name, optimizer)
    step = compiled(world)
    planned(world, step, 3)
    return world, step, Saved(world, step)


@pytest.mark.parametrize(
    ("failure", "error", "after"),
    [
        (fail(RuntimeError), RuntimeError, False),
        (fail(KeyboardInterrupt), KeyboardInterrupt, True),
        (no_memory, RuntimeError, False),
    ],
    ids=["error", "interrupt", "no memory"],
)
def test_a_failure_in_every_op_in_turn_leaves_later_steps_correct(
    failure: Callable[[], None], error: type[BaseException], after: bool
) -> None:
    world, step, saved = ready()
    program = runner_of(step).program
    with failing(program, -1, failure) as num_calls:
        step(world.batch)
    held = runner_of(step)._replay.held_bytes
    assert num_calls[0] >= runner_of(step).graph.num_ops
    for call in range(num_calls[0]):
        with failing(program, call, failure, after), pytest.raises(error):
            step(world.batch)
        assert runner_of(step)._replay.held_bytes <= held  # less where another test's arena ends
        saved.check()


def test_a_failure_while_recording_leaves_later_steps_correct() -> None:
    world, step, saved = ready()
    runner = runner_of(step)
    for call in range(0, 60, 6):
        runner._arranged, runner.program = None, runner._compile_recorded()
        with failing(runner.program, call, fail(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
            step(world.batch)
        assert runner._arranged is None
        saved.check()
        assert runner._arranged is not None


def test_interrupts_at_any_moment_leave_later_steps_correct() -> None:
    world, step, saved = ready()
    start = time.perf_counter()
    for _ in range(20):
        step(world.batch)
    seconds = (time.perf_counter() - start) / 20
    assert num_interrupted(100, 1.2 * seconds, lambda: step(world.batch), saved.check) > 10


def test_without_memory_for_the_arena_the_step_says_so_and_runs_later() -> None:
    world, step, saved = ready()
    step.release()
    runner = runner_of(step)
    arranged = runner._arranged
    runner._arranged = arranged._replace(table=arranged.table._replace(arena_bytes=1 << 60))
    with pytest.raises(olla.ReplayError, match="allocate"):
        step(world.batch)
    runner._arranged = arranged
    saved.check()


def test_without_memory_while_it_is_recorded_the_step_is_recorded_again() -> None:
    world = world_of("resnet50", "momentum")
    step = compiled(world)
    planned(world, step, 2)
    saved = Saved(world, step)
    runner = runner_of(step)
    runner.__init__(runner._captured, runner.plan, runner._replay, "", Place(""))
    with failing(runner.program, 40, no_memory), pytest.raises(RuntimeError, match="allocate memory"):
        step(world.batch)
    saved.restore()
    assert same(planned(world, step, 2), saved._losses)
    assert same(world.values(), saved._values)
    report = step.report()
    assert (report.in_arena, report.num_misses, runner._num_recordings) == (True, 0, 1)


def moved_plan(graph: olla.Graph, seed: int = 0) -> olla.Plan:
    rng = np.random.default_rng(seed)
    return olla.plan(graph, order=topological(graph, lambda v: rng.random()), layout=False, time_limit=0.0)


@pytest.mark.parametrize("is_exact", [True, False])
def test_another_order_is_recorded_again_only_if_lifetimes_cannot_be_known(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrange, "planned_again", lambda graph, before, progress, search: moved_plan(graph))
    if not is_exact:
        monkeypatch.setattr(Requests, "of", lambda recorded, addresses, graph: Requests.of_graph(graph))
    world = world_of("resnet50", "adamw")
    other = world.copy()
    step = compiled(world)
    losses = planned(world, step, 1)
    assert (runner_of(step)._arranged is not None) == is_exact
    losses += [step(world.batch) for _ in range(4)]
    assert same(losses, reference(other, step))
    assert same(world.values(), other.values())
    report = step.report()
    assert report.misses == ()
    assert report.measured_peak_bytes == report.planned_peak_bytes
    assert runner_of(step)._num_recordings == 2 - is_exact


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_a_thousand_steps_do_not_grow_the_process() -> None:
    world, step, _ = ready()

    def resident() -> tuple[int, int]:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            num_tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        return process_bytes(), num_tensors

    before = []
    for _ in range(3):
        before.append(resident())
        held = runner_of(step)._replay.held_bytes
        for _ in range(1000):
            step(world.batch)
    before.append(resident())
    growth = np.diff([memory for memory, _ in before])
    assert growth.min() < 1 << 20  # bytes; a leak of one small tensor in each step would be 4 MiB every time
    assert before[-1][1] == before[1][1]
    assert runner_of(step)._replay.held_bytes <= held
    report = step.report()
    assert (report.num_steps, report.num_misses) == (3003, 0)
    assert report.measured_peak_bytes == report.planned_peak_bytes


def test_threads_that_allocate_meanwhile_change_nothing() -> None:
    _, _, saved = ready()
    done = threading.Event()

    def load() -> None:
        kept = []
        while not done.is_set():
            kept = [torch.ones(1 + i) for i in range(64)][::2] + kept[:50]

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            saved.check()
    finally:
        done.set()
        for thread in threads:
            thread.join()


def batches() -> TensorDataset:
    return TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(3)))


def test_a_data_loader_that_forks_after_the_first_step_delivers() -> None:
    world = world_of("mlp", "adamw")
    other = world.copy()
    step = compiled(world, arena=True)
    other_step = compiled(other, arena=True)
    losses: list[list[Any]] = []
    for s, num_workers in ((step, 2), (other_step, 0)):
        torch.manual_seed(7)
        s(torch.zeros(4, 6))
        context = "fork" if num_workers else None
        loader = DataLoader(batches(), batch_size=4, num_workers=num_workers, multiprocessing_context=context)
        losses.append([s(batch) for (batch,) in loader])
    assert same(*losses)
    assert step.report().num_misses == 0


def test_children_forked_while_another_thread_runs_steps_are_healthy() -> None:
    world, step, saved = ready()
    kept = torch.ones(3)
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            step(world.batch)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(50):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of locks in general
                child = os.fork()
            if child == 0:
                replay = runner_of(step)._replay
                os._exit(0 if replay.held_bytes > 0 and float(kept[0]) == 1 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()
    saved.check()


def test_a_step_called_by_another_ones_operator_is_refused_and_both_stay_usable() -> None:
    world, step, saved = ready()
    inner = olla.compile(torch.nn.Linear(2, 2), loss=square)
    inner(torch.ones(1, 2))
    with (
        failing(runner_of(step).program, 20, lambda: inner(torch.ones(1, 2))),
        pytest.raises(olla.ReplayError, match="while another one runs"),
    ):
        step(world.batch)
    saved.check()
    assert inner(torch.ones(1, 2)).shape == ()


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_memory_of_the_recorded_call_is_given_back() -> None:
    def wide(x: Any) -> Any:
        for _ in range(8):
            x = torch.cat([x[:, :1], x.exp().sin()[:, 1:]], dim=1)
        return x

    step = olla.compile(torch.nn.Linear(2, 2), loss=lambda model, x: wide(model(x)).mean())
    step(torch.zeros(2, 2))
    batch = torch.zeros(1 << 21, 2)  # 16 MiB: glibc keeps blocks of this size once it has seen some
    before = process_bytes()
    step(batch)
    kept = process_bytes() - before
    step(batch)
    assert kept < 0.3 * step.report().arena_bytes
