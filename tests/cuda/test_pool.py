"""Ordinary loops in a pool of a GPU: autograd runs backward in a thread of its own there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import olla  # noqa: E402
from tests.cuda.test_compile import OPTIMIZERS, equal, example_of, ordinary, state_of  # noqa: E402


@pytest.mark.parametrize("name", ["gpt2", "resnet18"])
def test_a_loop_in_a_pool_computes_the_same_at_planned_addresses(device: torch.device, name: str) -> None:
    expected = ordinary(name, "adamw", 6)
    example = example_of(name)
    optimizer = OPTIMIZERS["adamw"](example.model.parameters())
    torch.manual_seed(5)
    losses = []
    with olla.pool("cuda") as pool:
        for _ in range(6):
            loss = example.loss(example.model, example.batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            pool.step()
        report = pool.report()
    assert equal((losses, state_of(example.model)), expected)
    assert report.state == "planned"
    assert report.num_misses == 0
    assert report.served_bytes >= 0.99 * report.requested_bytes
    assert report.arena_bytes == report.load_bytes
