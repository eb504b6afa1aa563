"""What an optimizer needs beside a step: before its first step and after it, whole and sharded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from olla.checkpointing.optimizer_memory import optimizer_memory  # noqa: E402

pytestmark = pytest.mark.torch
NUM_RANKS = 8


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


def held_before_and_after(model: nn.Module) -> tuple[tuple[int, int], ...]:
    optimizer = torch.optim.AdamW(model.parameters())
    before = optimizer_memory(optimizer, on_gpu=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = optimizer_memory(optimizer, on_gpu=True)
    return (before.state, before.update), (after.state, after.update)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def test_state_and_temporaries_are_those_of_the_parameters() -> None:
    size = sum(p.nbytes for p in layers().parameters())
    before, after = held_before_and_after(layers())
    assert before == (2 * size, size)
    assert after == (2 * size + 8 * 4, size)  # and a count of steps for each of 8 parameters, on the CPU


@pytest.mark.usefixtures("ranks")
def test_of_sharded_parameters_a_rank_holds_its_part() -> None:
    model = layers()
    size = sum(p.nbytes for p in model.parameters())
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    before, after = held_before_and_after(fully_shard(model, mesh=mesh))
    assert before == (2 * size // NUM_RANKS, size // NUM_RANKS)
    assert after == (before[0] + 8 * 4, before[1])
