"""Operators that torch has written in Python as well are torch's own in a planned graph, in bits and in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import olla
from tests.aten.loops import fresh, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
functional = torch.nn.functional
CLASSES, LABELS = torch.tensor([0, 2, 1, 3]), torch.tensor([[0, 2, -1, 1, 0]] * 4)
RESIZED = {
    f"{mode} {size}": (shape, {"mode": mode, size: value})
    for shape, modes in {
        (2, 3, 5): ("nearest", "nearest-exact", "linear"),
        (2, 3, 5, 7): ("nearest", "nearest-exact", "bilinear", "bicubic"),
        (2, 3, 4, 5, 3): ("nearest", "nearest-exact", "trilinear"),
    }.items()
    for mode in modes
    for size, value in (("scale_factor", 1.7), ("size", 9))
}


def assert_equal(function: Callable[[Any], Any], x: Any) -> None:
    """Require that function and gradient are eager's to the bit, and that torch's own operators made them."""
    results = []
    wrapped = olla.wrap(function, max_slowdown=0.5, time_limit=0.1)
    for called in (function, wrapped):
        leaf = x.clone().requires_grad_()
        result = called(leaf * 2)
        (result * torch.linspace(0.5, 1.5, result.numel()).view_as(result)).sum().backward()
        results.append((result.detach(), leaf.grad))
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    (graph,) = olla.report_of(wrapped).planned
    assert graph.num_ops <= 3  # forward, backward, and a second result of forward's


@pytest.mark.parametrize("how", RESIZED)
def test_resized_pictures(how: str) -> None:
    shape, given = RESIZED[how]
    torch.manual_seed(0)
    assert_equal(lambda x: functional.interpolate(x, **given), torch.randn(shape))


@pytest.mark.parametrize("align", [False, True])
def test_corners_that_are_aligned_and_antialiased_pictures(align: bool) -> None:
    def resized(x: Any) -> Any:
        return functional.interpolate(x, size=(3, 4), mode="bicubic", align_corners=align, antialias=True)

    assert_equal(resized, torch.randn(2, 3, 8, 9))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.hardshrink(x, 0.3),
        lambda x: functional.softshrink(x, 0.3),
        lambda x: functional.multi_margin_loss(x, CLASSES, margin=0.7),
        lambda x: functional.multilabel_margin_loss(x, LABELS),
    ],
)
def test_losses_and_shrinking(function: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    assert_equal(function, torch.randn(4, 5))


def test_what_others_compile_is_as_before() -> None:
    """A model that torch.compile takes with another backend still gets what torch has written in Python."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[int] = []

    def compiler(module: Any, _: Any) -> Any:
        found.append(sum("upsample" in str(node.target) for node in module.graph.nodes))
        return module.forward

    resize = nn.Upsample(scale_factor=2, mode="bilinear")
    x = torch.randn(1, 2, 3, 3, requires_grad=True)
    olla.wrap(lambda x: resize(x), max_slowdown=0.5)(x).sum().backward()
    torch.compile(lambda x: resize(x), backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))(x)
    assert found[0] == 0


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cells_of_recurrent_layers(cell: Any, bias: bool, dtype: Any) -> None:
    def gradients(wraps: bool) -> list[Any]:
        torch.manual_seed(0)
        step = cell(6, 13, bias=bias, dtype=dtype)

        def unrolled(x: Any) -> Any:
            state: Any = x.new_zeros(x.shape[1], 13)
            state = (state, state) if cell is nn.LSTMCell else state
            found = []
            for row in x:
                state = step(row, state)
                found.append(state[0] if cell is nn.LSTMCell else state)
            return torch.stack(found)

        called = olla.wrap(unrolled, time_limit=0.2) if wraps else unrolled
        found = called(torch.randn(5, 3, 6, dtype=dtype))
        found.square().sum().backward()
        return [found.detach(), *(p.grad for p in step.parameters())]

    assert all(same(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))
