"""Parameters that forward saves stay as they are, in code that Inductor generates."""

from __future__ import annotations

from typing import Any

import olla.inductor
from olla.inductor.compat.compat import config
from olla.inductor.saving import saved_inputs
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, fresh  # noqa: F401
from tests.support.pytorch.steps import nn, torch

RELAXED: dict[str, Any] = {"max_slowdown": 1.0}
CHANNELS = 64
WEIGHT_BYTES = CHANNELS * CHANNELS * 9 * 4


def network() -> tuple[nn.Module, torch.Tensor]:
    """Large weights, small images."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(2, CHANNELS, 8, 8)


def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_weights_of_convolutions_are_in_memory_once() -> None:
    settings = patches(**LEAST)
    with config.patch(settings):
        once = replay(*network(), loss)
    del settings[saved_inputs.HOOK]
    with config.patch(settings):
        twice = replay(*network(), loss)
    assert twice.peak_bytes - once.peak_bytes >= 2 * WEIGHT_BYTES
    assert sum(split.saved_bytes for split in twice.splits) == sum(split.saved_bytes for split in once.splits)


def test_the_numbers_are_those_of_torch_compile() -> None:
    def trained(**compiling: Any) -> list[torch.Tensor]:
        torch.compiler.reset()
        model, x = network()
        torch.compile(loss, **compiling)(model, x).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    ours = trained(backend="olla", options=LEAST)
    assert len(ours) == 8
    torch.testing.assert_close(ours, trained(), rtol=1e-4, atol=1e-6)


def test_the_users_own_pass_is_left_in_force() -> None:
    called: list[torch.fx.Graph] = []  # once for each half: this goal needs no code to be foreseen
    model, x = network()
    torch.compile(loss, backend="olla", options={**RELAXED, saved_inputs.HOOK: called.append})(model, x).backward()
    assert len(called) == 2
    with torch._inductor.config.patch({saved_inputs.HOOK: called.append}), olla.inductor.enable(**RELAXED):
        torch.compiler.reset()
        torch.compile(loss)(model, x).backward()
    assert len(called) == 4
