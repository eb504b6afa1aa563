"""A long life of olla.pool: changing shapes, exceptions, threads, compiled steps; flat memory and equal losses."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import olla

torch = pytest.importorskip("torch")
from olla.pytorch.memory import replay as planned  # noqa: E402
from tests.support.pytorch.windows import process_bytes  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc"),
]


def square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


class Life:
    """A loop whose iterations are drawn at random, the same ones for the same seed, with or without a pool."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        other = torch.nn.Linear(16, 4)
        self.step = olla.compile(other, optimizer=torch.optim.SGD(other.parameters(), lr=0.01), loss=square)
        self.step(torch.ones(8, 16))  # a capture hooks optimizers in all threads
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.losses: list[float] = []
        self.kept: list[Any] = []

    def iterate(self) -> None:
        """Run an iteration, or part of one that ends with an exception."""
        what = self.random.choices(["train", "eval", "step", "keep", "fail"], [70, 15, 5, 5, 5])[0]
        rows = self.random.choices([8, 32, self.random.randrange(1, 40)], [60, 30, 10])[0]
        batch = torch.ones(rows, 16) / (1 + rows)
        if what == "step":
            self.losses.append(float(self.step(torch.ones(8, 16))))
        if what == "eval":
            with torch.no_grad():
                self.losses.append(square(self.model, batch).item())
            return
        self.optimizer.zero_grad()
        loss = square(self.model, batch)
        if what == "fail":
            raise ZeroDivisionError
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        if what == "keep":
            self.kept = [*self.kept[-3:], batch, loss.detach()]


def live(life: Life, num_iterations: int, with_pool: bool) -> tuple[list[float], list[int], list[Any]]:
    """Return the losses, the memory of the process along the way, and reports of the pools."""
    memory, reports, done = [], [], 0
    while done < num_iterations:  # an exception or a release now and then begins a new pool
        pool = olla.pool(time_limit=0.2) if with_pool else None
        until = done + life.random.randrange(200, 600)
        try:
            if pool is not None:
                pool.__enter__()
            while done < min(until, num_iterations):
                done += 1
                try:
                    life.iterate()
                except ZeroDivisionError:
                    if life.random.random() < 0.1:
                        raise
                if pool is not None:
                    pool.step()
                if done % 100 == 0:
                    memory.append(process_bytes())
        except ZeroDivisionError:
            pass
        finally:
            if pool is not None:
                pool.__exit__(None, None, None)
                reports.append(pool.report())
        if life.random.random() < 0.3:
            life.step.release()
    return life.losses, memory, reports


def soak(num_iterations: int, num_threads: int) -> None:
    expected = [live(Life(seed), num_iterations, with_pool=False)[0] for seed in range(num_threads)]
    replay = planned.load(torch.device("cpu"))
    lives = [Life(seed) for seed in range(num_threads)]
    replay.release()
    gc.collect()
    held = replay.held_bytes
    found: dict[int, tuple[list[float], list[int], list[Any]]] = {}

    def run(seed: int) -> None:
        found[seed] = live(lives[seed], num_iterations, with_pool=True)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed][0] for seed in range(num_threads)] == expected
    for _, memory, reports in found.values():
        assert max(memory[len(memory) // 2 :]) - max(memory[: len(memory) // 2]) < 4 << 20, memory
        assert sum(report.num_planned for report in reports) > 0.6 * num_iterations
        assert all(report.state == "off" for report in reports)
    found.clear()
    lives.clear()
    replay.release()
    gc.collect()
    assert replay.held_bytes <= held


def test_a_short_life_of_pools_is_equal_and_leaves_nothing_behind() -> None:
    soak(2000, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("num_iterations", "num_threads"), [(30_000, 1), (10_000, 3)])
def test_a_long_life_of_pools_is_flat_equal_and_leaves_nothing_behind(num_iterations: int, num_threads: int) -> None:
    soak(num_iterations, num_threads)
