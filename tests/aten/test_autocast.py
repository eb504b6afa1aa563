"""Under autocast, and in half precision, planned graphs round as eager training does: forward, backward and masks."""

from __future__ import annotations

from typing import Any

import pytest

import olla
from tests.aten.loops import fresh, same  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
functional = torch.nn.functional


class Attention(nn.Module):
    """Causal attention with dropout: its products are written out, so that autocast decides how they round."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Any) -> Any:
        x = self.table(tokens)
        q, k, v = (t.unflatten(2, (4, 8)).transpose(1, 2) for t in self.qkv(x).split(32, 2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.out(x + self.dropout(mixed.transpose(1, 2).flatten(2)))


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x.transpose(0, 2)[1:],
    "of one row": lambda x: x.transpose(0, 1)[:1],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
}


class Layers(nn.Module):
    """Torch's own layers of a transformer: what they drop is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, 0.1, norm_first=i > 0, batch_first=i < 2) for i in range(3)
        )

    def forward(self, tokens: Any) -> Any:
        x, mask = self.table(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask if layer.self_attn.batch_first else None)
        return self.out(x)


def trained(wraps: bool, dtype: Any, make: type[nn.Module]) -> list[list[Any]]:
    """Return the gradients of three steps."""
    torch.manual_seed(0)
    model = make()
    if wraps:
        olla.wrap(model, max_slowdown=0.1, time_limit=0.2)
    found = []
    for _ in range(3):
        tokens = torch.randint(64, (4, 15))
        with torch.autocast("cpu", dtype):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    if wraps:
        assert olla.report_of(model).num_unplanned_calls == 0
    return found


@pytest.mark.parametrize("make", [Attention, Layers])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_outside_of_autocast(dtype: Any, make: type[nn.Module]) -> None:
    for eager, planned in zip(trained(False, dtype, make), trained(True, dtype, make), strict=True):
        assert all(same(a, b) for a, b in zip(eager, planned, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_in_every_precision_and_layout(layout: str, p: float, dtype: Any) -> None:
    torch.manual_seed(0)
    given, weights = torch.randn(2, 8, 6, 32, dtype=dtype)
    results = []

    def dropped(x: Any) -> Any:
        return functional.dropout(LAYOUTS[layout](x * 2), p, training=True)

    wrapped = olla.wrap(dropped, time_limit=0.2)
    for called in (dropped, wrapped):
        torch.manual_seed(1)
        leaf = given.clone().requires_grad_()
        result = called(leaf.clone())  # with a leaf of the user's own, the first call would run as it is
        result.backward(LAYOUTS[layout](weights))
        results.append((result.detach(), leaf.grad))
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    assert olla.report_of(wrapped).num_unplanned_calls == 0
