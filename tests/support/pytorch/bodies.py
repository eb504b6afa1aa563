"""Bodies of training loops of many kinds, for any device; test modules that import this are skipped without torch."""

from __future__ import annotations

from typing import Any

from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.pytorch.steps import World, images, net, square, torch


def world_of(body: Any, batch: Any = None, device: str = "cpu", **settings: Any) -> World:
    """A small network with a body of a training loop, or none, and its batch."""
    model = net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **settings)
    batch = images() if batch is None else batch
    return World(
        model, optimizer, [x.to(device) for x in batch] if isinstance(batch, list) else batch.to(device), None, body
    )


def ordinary(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = square(model, x)
    loss.backward()
    optimizer.step()
    return loss


def clipped_by_norm(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = square(model, x)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return {"loss": loss, "norm": norm}


def clipped_by_value(model: Any, optimizer: Any, x: Any) -> Any:
    loss = square(model, x)
    loss.backward()
    clip_grad_value_(model.parameters(), 1e-4)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accumulated(model: Any, optimizer: Any, batches: Any) -> Any:
    model.zero_grad()
    total = torch.zeros((), device=batches[0].device)
    for x in batches:
        loss = square(model, x) / len(batches)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def clamped(model: Any, optimizer: Any, x: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)
    loss = ordinary(model, optimizer, x)
    for p in model.parameters():
        p.grad.zero_()
        p.data.mul_(0.99)
    return loss


def by_hand(model: Any, optimizer: Any, x: Any) -> Any:
    for p in model.parameters():
        p.grad = None
    loss = square(model, x)
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = gradient + 0.01 * p.detach()
    optimizer.step()
    return loss, optimizer.param_groups[0]["weight_decay"]


def gradient_penalty(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    x = x.detach().requires_grad_()
    value = square(model, x)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    loss = value + (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss, slope


def adversarial(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    x = x.detach().requires_grad_()
    square(model, x).backward()
    noisy = (x + 0.01 * x.grad.sign()).detach()
    optimizer.zero_grad()
    loss = square(model, noisy)
    loss.backward()
    optimizer.step()
    return loss


def stepped_twice(model: Any, optimizer: Any, x: Any) -> Any:
    losses = []
    for part in x.chunk(2):
        optimizer.zero_grad()
        losses.append(square(model, part))
        losses[-1].backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def scaling(model: Any, optimizer: Any, x: Any) -> Any:
    scaler = torch.amp.GradScaler(x.device.type)
    optimizer.zero_grad()
    scaler.scale(square(model, x)).backward()
    scaler.step(optimizer)
    scaler.update()


BODIES = (
    ordinary,
    clipped_by_norm,
    clipped_by_value,
    accumulated,
    by_hand,
    gradient_penalty,
    adversarial,
    stepped_twice,
    clamped,
)


def batch_for(body: Any) -> Any:
    """What one of the bodies takes."""
    if body is accumulated:
        return [images(), images() + 1]
    return torch.cat([images(), images() + 1]) if body is stepped_twice else images()


def under_autocast(device: str, dtype: torch.dtype) -> list[World]:
    """Autocast inside a body around the loss alone, and around a loss function that is compiled."""

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = square(model, x)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return [
        world_of(body, device=device),
        World(model, optimizer, images().to(device), torch.autocast(device, dtype)(square)),
    ]
