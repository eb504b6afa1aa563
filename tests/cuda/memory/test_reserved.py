"""What torch's allocator reserves over the life of a loop: no more in pools, and with goals, than without."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import olla  # noqa: E402
from olla.pytorch.memory.replay import Replay  # noqa: E402
from tests.cuda.standin import Standin  # noqa: E402
from tests.support.pytorch.lifetimes import collect  # noqa: E402
from tests.support.pytorch.steps import nn  # noqa: E402
from tests.support.pytorch.windows import slots  # noqa: E402

NUM_STEPS = 7
MEBI = 2**20


def layers(number: int, *make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(part() for _ in range(number) for part in make))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: layers(6, lambda: nn.Linear(512, 512), nn.GELU), (1500, 512)),
    "convolutions": (
        lambda: layers(4, lambda: nn.Conv2d(16, 16, 3, padding=1), lambda: nn.BatchNorm2d(16), nn.SiLU),
        (4, 16, 64, 64),
    ),
    "norms": (lambda: layers(5, lambda: nn.LayerNorm(256), lambda: nn.Linear(256, 256), nn.Tanh), (2000, 256)),
    "weights alone": (lambda: layers(4, lambda: nn.Linear(800, 800)), (16, 800)),
    "an arena of few MiB": (lambda: layers(6, lambda: nn.Linear(128, 128), nn.ReLU), (1200, 128)),
}
# All blocks lie in segments of 2 MiB, and no matrix product has a workspace: an arena would add a segment of 20 MiB.
SMALL = {"small blocks": (lambda: layers(6, lambda: nn.LayerNorm(128), nn.Tanh), (1000, 128))}


def reserved(name: str, way: str, zero: str = "start", **options: Any) -> tuple[int, Any]:
    """Return the most bytes reserved, model and first step included, and the report of the way it was trained."""
    make, shape = (MODELS | SMALL)[name]
    torch.manual_seed(0)
    collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch).square().mean()

    if way == "step":
        step = olla.compile(model, optimizer=optimizer, loss=loss, disk_cache=False, time_limit=2.0, **options)
        for _ in range(NUM_STEPS):
            step(torch.randn(shape, device="cuda"))
        return torch.cuda.max_memory_reserved() - before, step.report()
    with olla.pool("cuda") if way == "pool" else contextlib.nullcontext() as pool:
        for _ in range(NUM_STEPS):
            if zero == "start":
                optimizer.zero_grad()
            batch = torch.randn(shape, device="cuda")
            if zero == "behind the batch":
                optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            if zero == "end":
                optimizer.zero_grad()
            del batch
            if pool is not None:
                pool.step()
        return torch.cuda.max_memory_reserved() - before, None if pool is None else pool.report()


CASES = [*((name, "start") for name in MODELS | SMALL), ("perceptron", "behind the batch"), ("perceptron", "end")]


@pytest.mark.parametrize(("name", "zero"), CASES)
def test_a_pool_reserves_no_more_than_the_loop_without(faults: Standin, name: str, zero: str) -> None:
    """Its arena is taken when gradients are gone, and left where it would lie in a segment of its own on top."""
    ordinary, _ = reserved(name, "eager", zero)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loop runs on torch's own allocator")
        pooled, report = reserved(name, "pool", zero)
    assert pooled <= ordinary
    assert report.state == "planned" or "reserve" in report.note
    assert report.num_misses == 0


def test_a_pool_that_would_reserve_more_says_so(faults: Standin) -> None:
    with pytest.warns(UserWarning, match=r"allocator would reserve \d+ bytes with it, and has reserved \d+ at most"):
        _, report = reserved("small blocks", "pool")
    assert report.state == "off"


@pytest.mark.parametrize("name", MODELS)
def test_a_goal_reserves_no_more_than_none_and_that_no_more_than_the_loop(faults: Standin, name: str) -> None:
    ordinary, _ = reserved(name, "eager")
    free, report = reserved(name, "step")
    assert report.in_arena
    assert free <= ordinary
    for options in ({"max_slowdown": 0.05}, {"max_slowdown": 0.1}, {"minimise": "peak"}):
        assert reserved(name, "step", **options)[0] <= free


def test_the_cache_is_emptied_only_for_an_arena_that_fits_nowhere(faults: Standin) -> None:
    """Batches of eleven sizes, the largest first: one arena serves them all."""
    model = layers(4, lambda: nn.Linear(256, 256), nn.GELU).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = olla.compile(
        model, optimizer=optimizer, loss=lambda m, x: m(x).square().mean(), disk_cache=False, cache_size=16
    )
    freed = []
    for rows in range(2200, 0, -200):
        for _ in range(3):
            step(torch.randn(rows, 256, device="cuda"))
        freed.append(torch.cuda.memory_stats()["segment.all.freed"])
    assert len(set(freed[1:])) == 1


@pytest.mark.parametrize(
    ("free", "together"),
    [([30, 30, 30], 100), ([30, 120], 150)],
    ids=["all are too small and go back to the device", "the arena lies in the second and both stay"],
)
def test_an_arena_is_not_reserved_beside_free_blocks(replay: Replay, free: list[int], together: int) -> None:
    """Sizes are in MiB; the arena's is 100."""
    collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held = [torch.empty(size * MEBI, dtype=torch.uint8) for size in free]
    del held
    assert torch.cuda.memory_reserved() - before == sum(free) * MEBI
    replay.activate(slots([[(100 * MEBI // 512, 0)]], 100 * MEBI // 512))
    assert torch.cuda.memory_reserved() - before == together * MEBI
    replay.deactivate()
