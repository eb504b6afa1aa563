"""Replayed peaks: the generated wrappers on fake tensors, beside the same wrappers with real kernels."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import olla.inductor
from olla.errors import CaptureError
from olla.inductor.simulate.step import replay, sweep
from olla.inductor.simulate.wrappers import LiveBytes
from tests.support.pytorch.steps import torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),  # Inductor's own imports
]
WIDTH, LENGTH = 16, 32


class Block(torch.nn.Module):
    """Attention and a wide layer, with what a partitioner likes to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 8 * WIDTH)
        self.narrow = torch.nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)[:, None]
        x = x + torch.nn.functional.scaled_dot_product_attention(y, y, y)[:, 0]
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


def step(num_blocks: int = 1) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(num_blocks))), torch.randn(4, LENGTH, WIDTH)


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().mean()
    return result


def test_live_bytes_count_every_storage_once_while_it_lives() -> None:
    live = LiveBytes()
    with live:
        x = torch.ones(256)
        y = x.view(16, 16)[2:]
        z = y + 1
        del x, y
        gc.collect()
        assert live.live_bytes == z.untyped_storage().nbytes()
    assert live.peak_bytes == 4 * (256 + 14 * 16)


def test_replay_equals_a_run_with_real_kernels() -> None:
    model, x = step()
    replayed = replay(model, x, loss)
    real = replay(model, x, loss, kernels=True)
    assert replayed.peak_bytes == real.peak_bytes
    assert replayed.eager_peak_bytes == real.eager_peak_bytes
    assert replayed.num_wrappers == real.num_wrappers == 2
    assert replayed.resident_bytes < replayed.peak_bytes < replayed.eager_peak_bytes


def test_replay_leaves_the_model_as_it_is() -> None:
    model, x = step()
    before = [p.clone() for p in model.parameters()]
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    replay(model, x, loss)
    for p, was, grad in zip(model.parameters(), before, grads, strict=True):
        assert type(p) is torch.nn.Parameter
        assert torch.equal(p, was)
        assert p.grad is grad


def test_optimizer_state_adds_to_peak_and_resident_bytes() -> None:
    model, x = step()
    plain, state = replay(model, x, loss), replay(model, x, loss, state_bytes=1000)
    assert state.peak_bytes - plain.peak_bytes == state.resident_bytes - plain.resident_bytes == 1000


def test_sweep_saves_less_and_recomputes_more_at_a_lower_budget() -> None:
    model, x = step(2)
    found = sweep(model, x, loss, (1.0, 0.3, 0.29))
    full, low = found[1.0], found[0.3]
    assert full.recomputed_flops == 0
    assert low.splits[0].num_recomputed > full.splits[0].num_recomputed
    assert low.splits[0].saved_bytes < full.splits[0].saved_bytes
    assert low.flops == full.flops > 0
    assert found[0.29] is low or found[0.29].splits[0].digest != low.splits[0].digest


def test_what_passes_leave_out_does_not_count_against_what_runs_again() -> None:
    class Repeating(torch.nn.Module):
        def __init__(self, inner: Any, times: int) -> None:
            super().__init__()
            self.inner, self.times = inner, times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            same = [x.sin() for _ in range(self.times)]  # one of them is left
            y: torch.Tensor = self.inner(sum(same[k % self.times] for k in range(40)))
            return y

    model, x = step(2)
    with olla.inductor.enable(minimise="peak"):
        (once,), (often,) = (replay(Repeating(model, times), x, loss).splits for times in (1, 40))
    assert often.digest == once.digest
    assert often.recomputed_flops == once.recomputed_flops > 0
    assert often.num_recomputed == once.num_recomputed - 1 > 0  # a second sine passes for one of those left out


def test_flops_are_those_of_the_matrix_products_and_attention() -> None:
    model, x = step()
    tokens, wide = 4 * LENGTH, 8 * WIDTH
    linear = 3 * 2 * (2 * tokens * WIDTH * wide)  # two layers: forward, gradient of input, gradient of weight
    product = 2 * 4 * LENGTH * LENGTH * WIDTH  # of the two in attention; five in its backward
    assert replay(model, x, loss).flops == linear + 7 * product


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it where the graph breaks
def test_a_graph_break_gives_two_splits() -> None:
    model, x = step()

    def broken(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        result: torch.Tensor = y.square().mean()
        return result

    found = replay(model, x, broken)
    assert len(found.splits) == 2
    assert found.peak_bytes > found.resident_bytes


def test_a_loss_that_is_no_number_is_refused() -> None:
    model, x = step()
    with pytest.raises(CaptureError, match="expected one number with gradients"):
        replay(model, x, lambda model, x: model(x))


def test_explain_shows_graphs_and_rivals() -> None:
    model, x = step(2)
    found = olla.inductor.explain(model, x, loss, minimise="peak", shares=(0.3,))
    shown = str(found)
    assert len(found.choices) == len(found.ours.splits) == 1
    choice = found.choices[0]
    assert choice is not None
    assert choice.peak_bytes <= choice.saved_peak_bytes
    assert found.best.peak_bytes <= found.default.peak_bytes
    assert found.ours.flops == found.default.flops
    for word in ("planned peak", "bound", "eager", "olla", "torch.compile", "activation_memory_budget=", "100.00 %"):
        assert word in shown
