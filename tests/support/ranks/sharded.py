"""What ranks do with sharded parameters in tests; each function runs in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def model() -> Any:
    """Return a model some of whose rows do not divide by two."""
    import torch

    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def beside_fsdp2(rank: int, world_size: int, *, parallel: str, store: Path, steps: int = 3) -> Any:
    """Run captured steps op by op, and FSDP2's or DDP's own; return the losses of both and the largest difference.

    Args:
        rank: of this process.
        world_size: how many there are.
        parallel: "fsdp" or "ddp".
        store: a path for a second group: a capture makes a group of its own.
        steps: to take.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import olla
    from olla.pytorch.program.run import run

    dist.destroy_process_group()
    ours, theirs = model(), model()
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(steps)]
    settings = {"lr": 0.05, "foreach": False}
    optimizer = torch.optim.AdamW(ours.parameters(), **settings)
    captured = olla.capture(ours, batches[0], optimizer=optimizer, loss=loss, world_size=world_size, parallel=parallel)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)

    whole = dict(ours.named_parameters())
    held: dict[Any, torch.Tensor] = {}
    for i in captured.inputs:
        if i.kind == "parameter":
            held[i.name] = (
                _shard(whole[str(i.key)].detach(), rank, world_size) if parallel == "fsdp" else whole[str(i.key)]
            )
        elif i.kind == "optimizer_state":
            held[i.name] = torch.zeros(()) if i.entry == "step" else torch.zeros_like(held[str(i.key)])
        elif i.kind == "rate":
            held[i.name] = torch.tensor(settings["lr"], dtype=torch.float64)
    found, wanted = [], []
    if parallel == "fsdp":
        fully_shard(theirs)
        reference: Any = theirs
    else:
        reference = torch.nn.parallel.DistributedDataParallel(theirs)
    their_optimizer = torch.optim.AdamW(reference.parameters(), **settings)
    for batch in batches:
        values = [held.get(i.name, batch) for i in captured.inputs]
        (ended,) = run(captured, values)
        found.append(float(ended))
        their_loss = loss(reference, batch)
        their_loss.backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
        wanted.append(float(their_loss.detach()))
    difference = 0.0
    for name, parameter in theirs.named_parameters():
        mine = parameter.detach().to_local() if parallel == "fsdp" else parameter.detach()
        difference = max(difference, float((held[name][: len(mine)] - mine).abs().max()) if len(mine) else 0.0)
    return found, wanted, difference


def _shard(tensor: Any, rank: int, world_size: int) -> Any:
    import torch

    rows = -(-tensor.shape[0] // world_size)
    mine = tensor[rank * rows : (rank + 1) * rows]
    padding = [0] * (2 * mine.dim() - 1) + [rows - mine.shape[0]]
    return torch.constant_pad_nd(mine, padding).clone()
