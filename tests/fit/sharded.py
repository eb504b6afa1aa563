"""A step for tests that ask which of its sizes fit many ranks."""

from __future__ import annotations

from typing import Any


def make_step(n: int) -> Any:
    """Return model, batch, optimizer and loss of a step of n rows."""
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    return model, torch.ones(n, 64, device="meta"), optimizer, lambda model, x: model(x).square().mean()
