"""Selective activation checkpointing: its policies hold in captured steps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import olla
from olla.pytorch.capture import exclusive
from tests.support.pytorch.steps import IS_211, World, nn, same, square, torch

pytestmark = pytest.mark.torch


class Selective(nn.Module):
    """Blocks in checkpoints: plain ones, or with a policy that saves some operators."""

    def __init__(self, saved: tuple[Any, ...] | None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)) for _ in range(4)
        )
        self.contexts: dict[str, Any] = {}
        if saved is not None:

            def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

            self.contexts["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, **self.contexts)
        return x


def selective_peak(saved: tuple[Any, ...] | None) -> int:
    model = Selective(saved)
    captured = olla.capture(model, torch.ones(512, 16), loss=square, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    return olla.plan(captured.graph, layout=False, time_limit=0.0).program_peak_bytes


MATRIX_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def test_a_checkpoint_whose_policy_saves_nothing_needs_the_memory_of_a_plain_one() -> None:
    assert selective_peak(()) == selective_peak(None) < selective_peak(MATRIX_PRODUCTS)


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}])
def test_a_checkpoint_that_saves_matrix_products_is_planned_and_equals_the_ordinary_loop(goal: dict[str, Any]) -> None:
    models = [Selective(MATRIX_PRODUCTS, 0.2) for _ in range(2)]
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    eager, planned = (World(m, torch.optim.AdamW(m.parameters(), foreach=False), x, square) for m in models)
    step = planned.compiled(**goal)
    assert same(planned.planned(step, 5), eager.eager(5))
    assert same(planned.values(), eager.values())


@pytest.mark.skipif(IS_211, reason="torch 2.11 was not seen to do that")
def test_a_torch_that_would_save_what_a_policy_recomputes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusive, "checkpoints", lambda capture: contextlib.nullcontext())
    with pytest.raises(olla.CaptureError, match=r"activation checkpointing tells it to\. Leave context_fn out"):
        selective_peak(())
    assert selective_peak(None) > 0
    assert not torch.fx.traceback.current_meta  # it would be written into every graph that torch records from now on
