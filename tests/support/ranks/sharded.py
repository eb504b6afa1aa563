"""What ranks do with sharded parameters in tests; each function runs in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.ranks.processes import Raised


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
    from tests.support.pytorch.steps import run

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


def beside_eager(rank: int, world_size: int, *, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train models in fully_shard; return for each case what was found in both ways, or what was raised.

    Args:
        rank: of this process.
        world_size: how many there are.
        cases: name -> options of `trained`; "olla" holds those of olla.compile.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, options in cases.items():
        both = {key: value for key, value in options.items() if key != "olla"}
        found[name] = {}
        for way, further in (("eager", None), ("olla", options.get("olla", {}))):
            try:
                found[name][way] = trained(rank, further, **both)
            except Exception as error:
                found[name][way] = Raised(type(error).__name__, str(error))
    return found


def trained(
    rank: int,
    compiled: dict[str, Any] | None,
    *,
    model: str,
    optimizer: str = "AdamW",
    before: int = 0,
    steps: int = 20,
    then: int = 0,
    fsdp: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a model whose blocks and rest are in fully_shard; return losses, shards and what the report says.

    Args:
        rank: of this process.
        compiled: options of olla.compile; None: an ordinary loop.
        model: its name.
        optimizer: name of its class.
        before: steps of the ordinary loop at first.
        steps: to take.
        then: steps of the ordinary loop after them.
        fsdp: options of fully_shard.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    import olla
    from tests.support.ranks import parallel

    net = parallel.made(model)
    for module in list(net.modules()):
        if isinstance(module, torch.nn.Sequential) or "Block" in type(module).__name__:
            fully_shard(module, **(fsdp or {}))
    fully_shard(net, **(fsdp or {}))
    updates = getattr(torch.optim, optimizer)(net.parameters(), lr=1e-2)
    given = parallel.batches(model, rank, before + steps + then)
    earlier = [float(parallel.plain(net, updates, batch)) for batch in given[:before]]
    given = given[before:]
    found: dict[str, Any] = {}
    if compiled is None:
        losses = [float(parallel.plain(net, updates, batch)) for batch in given[:steps]]
    else:
        how = {"loss": parallel.loss} if "step" not in compiled else {}
        step = olla.compile(net, optimizer=updates, time_limit=1.0, **how, **compiled)
        losses = [float(step(batch)) for batch in given[:steps]]
        report, graph, plan = step.report(), step.graph, step.plan
        olla.check(graph, plan)
        found["report"] = (report.num_misses, report.planned_peak_bytes, report.measured_peak_bytes)
        kinds = [graph.collectives[v] for v in plan.order.tolist()]
        found["order"] = [kind for kind in kinds if kind]
        found["captures"], found["told"] = report.num_captures, str(report)
    losses += [float(parallel.plain(net, updates, batch)) for batch in given[steps:]]
    state = [t for entries in updates.state.values() for t in entries.values()]
    tensors = [getattr(t, "_local_tensor", t) for t in (*net.parameters(), *net.buffers(), *state)]
    found |= {"losses": earlier + losses, "tensors": [t.detach().double().flatten().tolist() for t in tensors]}
    return found


def _shard(tensor: Any, rank: int, world_size: int) -> Any:
    import torch

    rows = -(-tensor.shape[0] // world_size)
    mine = tensor[rank * rows : (rank + 1) * rows]
    padding = [0] * (2 * mine.dim() - 1) + [rows - mine.shape[0]]
    return torch.constant_pad_nd(mine, padding).clone()
