"""Models in FSDP2, in a DistributedDataParallel and in tensor parallel: before and after, with the same results."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

import olla  # noqa: E402
from tests.checkpointing.blocks import Residual, mlp  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def split(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"1": ColwiseParallel(), "4": RowwiseParallel()})
    return model


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [*found, *(p.detach().clone() for p in whole)]


@pytest.mark.parametrize("spread", [sharded, replicated, split])
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_spread_model_trains_the_same(spread: Callable[[nn.Module], nn.Module], is_first: bool) -> None:
    x = torch.randn(256, 32)
    torch.manual_seed(0)
    theirs = spread(Residual(*(mlp() for _ in range(4))))
    torch.manual_seed(0)
    ours: nn.Module = Residual(*(mlp() for _ in range(4)))
    ours = ours if is_first else spread(ours)
    found = olla.checkpoint(ours, x, max_slowdown=0.2, plan_for="a100")
    ours = spread(ours) if is_first else ours
    assert found.modules
    assert not found.is_real
    assert all(map(torch.equal, trained(theirs, x), trained(ours, x)))
    assert olla.checkpoint.remove(ours) == len(found.modules)
