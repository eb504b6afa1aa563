"""What is measured on fake tensors is what torch's allocator is asked for."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from bench.support.requested import requested  # noqa: E402
from olla.checkpointing.candidates import candidates  # noqa: E402
from olla.checkpointing.model import Model  # noqa: E402
from olla.checkpointing.regions import ModuleRegion, apply, remove  # noqa: E402
from olla.checkpointing.trace import TrainingStep  # noqa: E402
from olla.graph import PROFILES  # noqa: E402
from tests.checkpointing.blocks import Residual, conv, mlp, square  # noqa: E402
from tests.support.pytorch import models  # noqa: E402

pytestmark = pytest.mark.torch

DEVICE = PROFILES["a100"]


def resident(model: nn.Module, batch: Any) -> int:
    """Return the bytes that are there before a step."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers(), *leaves)}.values())


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt2", "llama_100m", "t5_small", "vit_b16", "unet"])
@pytest.mark.parametrize("share", [0.0, 0.15, 0.4])
def test_peaks_are_those_of_torchs_allocator(name: str, share: float) -> None:
    if name in ("mlp", "conv"):
        blocks = [mlp(64, 0.1) for _ in range(6)] if name == "mlp" else [conv(16) for _ in range(5)]
        model: nn.Module = Residual(*blocks)
        batch: Any = torch.randn(256, 64) if name == "mlp" else torch.randn(4, 16, 24, 24)
        loss: Any = square
    else:
        example = models.build(name, 2, tiny=True, device="cpu")
        model, batch, loss = example.model, example.batch, example.loss
    step = TrainingStep(model, batch, loss, DEVICE)
    base = step.measure({})
    found, _ = candidates(step.trace(), selective=True)
    plan = Model(step.trace(), found)
    choice = plan.solve(most_seconds=share * base.seconds, most_bytes=None, time_limit=5.0, seed=0)
    assert choice is not None
    regions = plan.regions(choice)
    measured = step.measure(regions)
    for part, region in regions.items():
        apply(model.get_submodule(part), region)
    real = requested(lambda: loss(model, batch).backward(), model.zero_grad).tensor_bytes + resident(model, batch)
    for part in regions:
        remove(model.get_submodule(part))
    assert measured.peak_bytes == pytest.approx(real, rel=0.01)
    assert choice.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1)


def test_a_model_stays_as_it_was_while_it_is_measured() -> None:
    model, x = Residual(conv(), conv()), torch.randn(2, 8, 6, 6)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    for is_real in (False, True):
        step = TrainingStep(model, x, square, DEVICE, is_real)
        step.trace()
        step.measure({"blocks.0": ModuleRegion()})
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert torch.equal(state, torch.get_rng_state())
    assert all("forward" not in vars(module) for module in model.modules())


def test_fake_and_real_steps_measure_the_same() -> None:
    model, x = Residual(*(mlp() for _ in range(4))), torch.randn(64, 32)
    regions = {"blocks.1": ModuleRegion(), "blocks.2": ModuleRegion(frozenset({("aten.addmm.default", 2)}))}
    fake, real = (TrainingStep(model, x, square, DEVICE, is_real).measure(regions) for is_real in (False, True))
    assert fake.peak_bytes == real.peak_bytes
    assert fake.seconds == pytest.approx(real.seconds)
