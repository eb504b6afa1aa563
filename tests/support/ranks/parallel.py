"""Models in DistributedDataParallel, and what they compute in an ordinary loop and through olla."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import olla


class Small(nn.Module):
    """Two layers, one with a parameter that may be left unused."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.spare = nn.Linear(8, 8) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x)))


class Branches(nn.Module):
    """Two layers, of which a rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[torch.distributed.get_rank()](x)


class ResNet(nn.Module):
    """Three residual blocks with batch normalisation, whose buffers are broadcast."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = nn.functional.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def gpt2() -> nn.Module:
    """Return a GPT-2 of two layers with random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def made(name: str) -> nn.Module:
    """Return a model by its name, the same on every rank."""
    torch.manual_seed(0)
    kinds = {"small": Small, "unused": lambda: Small(unused=True), "branches": Branches, "resnet": ResNet, "gpt2": gpt2}
    return kinds[name]()


def batches(name: str, rank: int, steps: int) -> list[Any]:
    """Return a batch for each step, of this rank."""
    draw = torch.Generator().manual_seed(17 + rank)
    if name == "gpt2":
        return [torch.randint(0, 96, (2, 16), generator=draw) for _ in range(steps)]
    shape = (4, 3, 8, 8) if name == "resnet" else (6, 8)
    return [torch.randn(shape, generator=draw) for _ in range(steps)]


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss of any of the models."""
    if batch.dtype == torch.int64:
        return model(input_ids=batch, labels=batch).loss
    return model(batch).square().mean()


def accumulated(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    """Train on a batch in two parts, and reduce the gradients of both at once."""
    optimizer.zero_grad()
    first, second = batch.chunk(2)
    with model.no_sync():
        (loss(model, first) / 2).backward()
    last = loss(model, second) / 2
    last.backward()
    optimizer.step()
    return last.detach()


def clipped(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    """Train with gradients whose norm is clipped, after they are reduced."""
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return value.detach()


def twice(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    """Add the gradients of two passes, each of which is reduced."""
    optimizer.zero_grad()
    for part in batch.chunk(2):
        value = loss(model, part)
        value.backward()
    optimizer.step()
    return value.detach()


BODIES = {"accumulated": accumulated, "clipped": clipped, "twice": twice}


def plain(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    """Train as everybody does."""
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return value.detach()


def trained(
    rank: int,
    way: str,
    *,
    model: str = "small",
    body: str = "",
    steps: int = 20,
    then: int = 0,
    warm: bool = False,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a wrapped model; return losses, parameters, buffers and what the report says.

    Args:
        rank: of this process.
        way: "eager", or "olla".
        model: its name.
        body: name of the step function; empty: the ordinary loop.
        steps: to take.
        then: steps of the ordinary loop after them.
        warm: whether DistributedDataParallel has rebuilt its buckets before the first step.
        ddp: options of DistributedDataParallel.
        options: of olla.compile.
    """
    wrapped = DistributedDataParallel(made(model), **(ddp or {}))
    given = batches(model, rank, steps + then)
    if warm:
        _rebuild(wrapped, given[0])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    found: dict[str, Any] = {}
    if way == "eager":
        step = BODIES.get(body, plain)
        losses = [float(step(wrapped, optimizer, batch)) for batch in given[:steps]]
        found["bucket_bytes"] = bucket_bytes(wrapped)
    else:
        how = {"step": BODIES[body]} if body else {"loss": loss}
        compiled = olla.compile(wrapped, optimizer=optimizer, time_limit=1.0, **how, **options)
        losses = [float(compiled(batch)) for batch in given[:steps]]
        report, graph, plan = compiled.report(), compiled.graph, compiled.plan
        olla.check(graph, plan)
        found["report"] = (report.num_misses, report.planned_peak_bytes, report.measured_peak_bytes)
        order = plan.order.tolist()
        for kind in ("all_reduce", "broadcast"):
            found[kind] = [int(graph.message_bytes[v]) for v in order if graph.collectives[v] == kind]
    losses += [float(plain(wrapped, optimizer, batch)) for batch in given[steps:]]
    tensors = [*wrapped.module.parameters(), *wrapped.module.buffers()]
    found |= {"losses": losses, "tensors": [t.detach().double().flatten().tolist() for t in tensors]}
    return found


def _rebuild(wrapped: Any, batch: Any) -> None:
    """Let a DistributedDataParallel rebuild its buckets, and leave parameters and buffers as they are."""
    before = [t.detach().clone() for t in (*wrapped.parameters(), *wrapped.buffers())]
    for _ in range(3):
        loss(wrapped, batch).backward()
        wrapped.zero_grad()
    with torch.no_grad():
        for tensor, old in zip((*wrapped.parameters(), *wrapped.buffers()), before, strict=True):
            tensor.copy_(old)


def bucket_bytes(wrapped: Any) -> list[int]:
    """Return the sizes of the buckets that DistributedDataParallel uses from its second step on."""
    with contextlib.suppress(RuntimeError):
        wrapped.reducer._rebuild_buckets()
    return [b.buffer().numel() * b.buffer().element_size() for b in wrapped.reducer._get_zeros_like_grad_buckets()]
