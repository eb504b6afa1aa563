"""olla.pool among forks, compiled steps, other pools, threads, exceptions and generators."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import olla

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from olla.pytorch.kinds import Kinds  # noqa: E402
from tests.support.pytorch.steps import Loop, equal, images, net  # noqa: E402
from tests.support.pytorch.windows import process_bytes, record  # noqa: E402

pytestmark = pytest.mark.torch
NUM_REQUESTS = 100_000
RECORDED = NUM_REQUESTS * 48  # bytes, the least that their records take
NOISE = RECORDED / 3  # bytes of pages touched for the first time
needs_fork = pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs fork and /proc")


class Growth(Dataset[int]):
    """Each item says by how much its worker grew over many allocations."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return growth()


def growth() -> int:
    """Return by how much this process grows over many requests that are not touched.

    Each is so large that glibc maps it apart from the heap: requests of 64 bytes take a path through all that was freed
    in the heap before, and its pages become resident again.
    """
    before = process_bytes()
    for _ in range(NUM_REQUESTS):
        torch.empty(64 * 2**20, dtype=torch.uint8)
    return process_bytes() - before


def square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def train(model: Any, pool: Any, num_iterations: int) -> None:
    for _ in range(num_iterations):
        model.zero_grad()
        square(model, images()).backward()
        pool.step()


# Forks


@needs_fork
@pytest.mark.parametrize("planned", [False, True], ids=["recording", "planned"])
def test_workers_forked_inside_a_pool_stay_flat(planned: bool) -> None:
    model = net()
    with olla.pool() as pool:
        train(model, pool, 6 if planned else 0)
        torch.empty(16)  # the window of an iteration is open, and has requests
        loader = DataLoader(Growth(), batch_size=1, num_workers=2, multiprocessing_context="fork")
        grown = [int(batch) for batch in loader]
        train(model, pool, 6)
        report = pool.report()
    assert max(grown[4:]) < NOISE, grown  # without a pool, too, the first two items of a worker touch pages
    assert report.state == "planned"


def in_child(body: Callable[[], bool]) -> bool:
    """Run it in a forked child, and return what it returns; False if it raises, after the traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of locks in general
        child = os.fork()
    if child == 0:
        result = False
        torch.set_num_threads(1)  # the threads that kernels share are not in the child
        try:
            result = body()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0 if result else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), f"the child was ended by signal {-status}"
    return status == 0


@needs_fork
def test_a_forked_child_runs_the_loop_without_the_pool_and_leaves_its_parent_alone() -> None:
    # Where an earlier test has traced a step, autograd of torch's build with CUDA runs in no forked child.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(fork_amid_a_loop).result()


def fork_amid_a_loop() -> None:
    stock = Loop("gpt2")
    pooled = stock.copy()
    torch.manual_seed(1)
    for _ in range(10):
        stock.iterate()

    def child() -> bool:
        kept = [p.grad.clone() for p in pooled.model.parameters()]
        same = all(torch.equal(p.grad, g) for p, g in zip(pooled.model.parameters(), kept, strict=True))
        before = pool.report().num_planned
        for _ in range(3):
            pooled.iterate()
            pool.step()
        report = pool.report()
        pool.__exit__(None, None, None)
        with olla.pool() as own:
            train(net(), own, 6)
        return same and report.state == "off" and report.num_planned == before and own.report().num_planned > 0

    torch.manual_seed(1)
    with olla.pool() as pool:
        for i in range(10):
            pooled.iterate()
            if i in (1, 7):
                assert in_child(child)
            pool.step()
    assert equal(stock, pooled)
    assert pool.report().num_misses == 0


@needs_fork
def test_a_child_forked_amid_a_recorded_step_neither_records_nor_fails() -> None:
    model = net()
    healthy: list[bool] = []

    class Fork(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    def child() -> bool:
        gc.disable()  # a collection would touch pages that the child has not yet
        growth()
        grown = growth()
        print(f"the child grew by {grown} bytes", file=sys.stderr)
        return grown < NOISE

    from olla.pytorch.memory.replay import load

    replay = load(torch.device("cpu"))
    record(replay, 1)
    replay.begin(0)
    healthy.append(in_child(child))
    square(Fork(), model(images()))
    assert growth() >= RECORDED - NOISE  # what the child would have grown by
    replay.end()
    assert len(replay.stop_recording().num_bytes) > NUM_REQUESTS
    assert healthy == [True]


@needs_fork
def test_a_child_forked_while_the_allocator_is_loaded_loads_it_too() -> None:
    from olla.pytorch.memory import extension

    extension.load_module("cpu")

    def child() -> bool:
        signal.alarm(20)
        return extension.load_module("cpu") is not None

    with extension._lock:  # as another thread would hold it
        assert in_child(child)


# Compiled steps


@pytest.mark.parametrize("budget", [None, "1MB"])
def test_a_compiled_step_inside_a_pool_and_the_pool_both_work(budget: str | None) -> None:
    stock, stock_other = net(), net()
    stock_other.load_state_dict(stock.state_dict())
    pooled, other = (net() for _ in range(2))
    for model in (pooled, other):
        model.load_state_dict(stock.state_dict())
    options = {} if budget is None else {"budget": budget}

    def run(model: Any, step: Any, pool: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(12):
            model.zero_grad()
            loss = square(model, images())
            loss.backward()
            losses += [loss.item(), float(step(images()))]
            if pool is not None:
                pool.step()
        return losses

    expected = run(stock, olla.compile(stock_other, loss=square), None)
    step = olla.compile(other, loss=square, **options)
    with olla.pool() as pool:
        found = run(pooled, step, pool)
        assert pool.report().state == "planned"
    assert found == expected
    report = pool.report()
    assert (report.num_iterations, report.num_misses) == (12, 0)
    assert report.num_planned >= 7
    assert report.served > 0.999
    assert step.report().num_misses == 0


def test_a_step_that_fails_inside_a_pool_leaves_both_usable() -> None:
    model, other = net(), net()
    step = olla.compile(other, loss=square)
    with olla.pool() as pool:
        for i in range(12):
            if i % 3 == 2:
                with pytest.raises(RuntimeError):
                    step(torch.zeros(2, 7, 3))  # no batch of this model
            step(images())
            train(model, pool, 1)
        assert pool.report().state == "planned"
    assert pool.report().num_iterations == 12
    assert step.report().in_arena


# Order of entering and leaving


def test_pools_do_not_nest_and_are_entered_once() -> None:
    with olla.pool() as pool:
        with pytest.raises(olla.ReplayError, match="pools do not nest"):
            olla.pool().__enter__()
        with pytest.raises(olla.ReplayError, match="entered already, by thread 'MainThread'"):
            pool.__enter__()
        train(net(), pool, 6)
        with pytest.raises(olla.ReplayError, match="pools do not nest"):
            olla.pool().__enter__()
        train(net(), pool, 2)
    assert pool.report().num_planned > 0
    pool.__exit__(None, None, None)
    with pytest.raises(olla.ReplayError, match="outside"):
        pool.step()
    with pool:
        train(net(), pool, 3)
    assert pool.report().num_iterations == 11


def test_threads_have_pools_of_their_own_and_are_told_so() -> None:
    reports, refused = [], []

    def work() -> None:
        with olla.pool() as own:
            train(net(), own, 8)
        reports.append(own.report())
        for call in (pool.step, lambda: pool.__exit__(None, None, None), pool.__enter__):
            try:
                call()
            except olla.ReplayError as error:
                refused.append(str(error))

    with olla.pool() as pool:
        model = net()
        train(model, pool, 4)
        threads = [threading.Thread(target=work, name="worker") for _ in range(3)]
        for thread in threads:
            thread.start()
        train(model, pool, 20)
        for thread in threads:
            thread.join()
        assert pool.report().state == "planned"
    assert pool.report().num_misses == 0
    assert all(report.num_planned >= 4 for report in reports)
    assert len(refused) == 9
    assert all("by thread 'MainThread'" in text for text in refused)


def test_a_loop_in_a_generator_ends_with_it() -> None:
    model, pools = net(), []

    def losses() -> Iterator[float]:
        with olla.pool() as pool:
            pools.append(pool)
            while True:
                model.zero_grad()
                loss = square(model, images())
                loss.backward()
                yield loss.item()
                pool.step()

    for _ in range(2):
        running = losses()
        for _ in range(8):
            next(running)
        running.close()
        assert pools[-1].report().num_planned > 0
        with olla.pool() as after:
            train(model, after, 2)


def test_an_interrupted_layout_leaves_the_loop_going(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, interrupts = Kinds._plan, []

    def interrupted(*args: Any) -> None:
        if not interrupts:
            interrupts.append(True)
            raise KeyboardInterrupt
        plan(*args)

    monkeypatch.setattr(Kinds, "_plan", interrupted)
    model = net()
    with olla.pool() as pool:
        with pytest.raises(KeyboardInterrupt):
            train(model, pool, 8)
        train(model, pool, 8)
    assert pool.report().num_planned > 0
    interrupts.clear()
    with pytest.raises(KeyboardInterrupt), olla.pool() as pool:
        train(model, pool, 8)
    with olla.pool() as pool:
        train(model, pool, 2)


def test_a_loop_whose_arena_finds_no_room_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from olla.pytorch.memory.replay import Replay

    count = Replay.loop_counters

    def full(replay: Replay) -> Any:
        if replay.arena[1]:
            raise MemoryError("no room")
        return count(replay)

    monkeypatch.setattr(Replay, "loop_counters", full)
    with olla.pool() as pool, pytest.warns(UserWarning, match="no room for an arena"):
        train(net(), pool, 8)
    report = pool.report()
    assert (report.num_iterations, report.num_planned, report.state) == (8, 0, "off")
