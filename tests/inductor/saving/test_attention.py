"""Attention, and other operators that may draw random numbers or hold graphs of their own, among what is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import olla.inductor
from olla.inductor.compat import compat
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, fresh, square, untold, without_kernels  # noqa: F401
from tests.support.pytorch.steps import nn, torch

families = pytest.importorskip("tests.support.pytorch.programs.families")
FAST = ("llama", "bert", "whisper")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")]


class Attending(nn.Module):
    """Blocks of attention, checkpointed or not; dropout is drawn from the generator where Inductor leaves it there."""

    def __init__(
        self, number: int = 3, width: int = 32, *, again: bool = True, share: float = 0.0, wide: bool = False
    ) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(number))
        self.again, self.share = again, share

    def block(self, x: torch.Tensor, qkv: nn.Module) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + dropout(gelu(y), self.share, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv in self.qkv:
            x = checkpoint(self.block, x, qkv, use_reentrant=False) if self.again else self.block(x, qkv)
        return x


def gradients(model: nn.Module, x: torch.Tensor, loss: Callable[..., torch.Tensor], **compiling: Any) -> list[Any]:
    """Return the loss and all gradients of a step, from the same random numbers; compiled if that is asked for."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    value = (torch.compile(loss, **compiling) if compiling else loss)(model, x)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def planned(**goal: Any) -> dict[str, Any]:
    return {"backend": without_kernels(patches(**goal)["custom_partitioner_fn"])}


@pytest.mark.parametrize("goal", [{}, LEAST, {"max_slowdown": 0.0}], ids=["usual", "least", "time"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_checkpointed_attention_and_dropout_are_planned_and_train_as_with_torch(
    share: float, goal: dict[str, Any]
) -> None:
    model, x = Attending(share=share), torch.randn(2, 16, 32)
    expected = gradients(model, x, square, backend=without_kernels(compat.min_cut_partition))
    if not share:
        torch.testing.assert_close(gradients(model, x, square), expected)
    torch.compiler.reset()
    torch.testing.assert_close(gradients(model, x, square, **planned(**goal)), expected)


def test_generated_code_draws_what_a_checkpoint_drew_from_the_generator() -> None:
    model, x = Attending(1, share=0.3), torch.randn(2, 8, 32)
    expected = gradients(model, x, square)
    with torch._inductor.config.patch(fallback_random=True):
        found = gradients(model, x, square, backend="olla", options=LEAST)
    torch.testing.assert_close(found, expected)


def test_what_a_checkpoint_makes_of_attention_is_made_again_and_not_saved() -> None:
    free, bound = (replay(Attending(again=a), torch.randn(2, 64, 32), square, backend="olla") for a in (False, True))
    assert bound.recomputed_flops > free.recomputed_flops
    assert sum(s.saved_bytes for s in bound.splits) < sum(s.saved_bytes for s in free.splits)
    assert bound.peak_bytes < free.peak_bytes


def test_attention_runs_again_where_that_lowers_the_least_peak() -> None:
    found = replay(Attending(6, again=False), torch.randn(4, 64, 32), square, backend="olla", options=LEAST)
    name = "scaled_dot_product_flash_attention_for_cpu.default("
    forward, backward = (source.count(name) for source in found.sources)
    assert forward == 6
    assert backward >= 3


def test_explain_shows_checkpointed_attention_beside_torchs_choices() -> None:
    found = olla.inductor.explain(Attending(1), torch.randn(2, 32, 32), square, max_slowdown=0.05, shares=(0.5,))
    assert None not in found.choices
    assert "left to torch" not in str(found)
    assert found.ours.recomputed_flops <= found.default.recomputed_flops  # what torch runs by a state counts as well


class Branching(Attending):
    """With an operator that holds graphs of its own, in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x, self.qkv[0])
        x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return self.block(gelu(x), self.qkv[1])


@pytest.mark.parametrize("goal", [{}, LEAST], ids=["usual", "least"])
def test_operators_that_hold_graphs_are_planned_around(goal: dict[str, Any]) -> None:
    model, x = Branching(2), torch.randn(2, 16, 32)
    for data in (x, -x):
        expected = gradients(model, data, square)
        torch.testing.assert_close(gradients(model, data, square, **planned(**goal)), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in families.CLASS]
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_graph_of_a_family_is_planned_and_its_gradients_are_those_of_torch(name: str, checkpointed: bool) -> None:
    model, data = families.family(name, checkpointed=checkpointed)
    model.train(checkpointed)  # eval: dropout that is no module
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = gradients(model, data, families.loss_of, backend=without_kernels(compat.min_cut_partition))
    torch.compiler.reset()
    found = gradients(model, data, families.loss_of, **planned())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
