"""olla.compile with buckets: batches of many lengths, few captures, and a loss that padding does not change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olla

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from olla.pytorch.lengths.padding import Padding  # noqa: E402

pytestmark = pytest.mark.torch

FILL = {"input_ids": 0, "labels": -100}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).eval()


def loss_of(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def batches(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, 97, (2, length), generator=generator) for length in lengths]
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def test_few_captures_serve_all_lengths_and_losses_are_those_of_the_loop_to_rounding() -> None:
    eager, compiled = gpt2(), gpt2()
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (eager, compiled))
    step = olla.compile(compiled, optimizer=other, loss=loss_of, buckets=[16, 8], fill=FILL, disk_cache=False)
    for batch in batches([5, 8, 3, 12, 16, 9, 7, 10]):
        optimizer.zero_grad()
        loss = loss_of(eager, batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), loss.detach(), rtol=1e-5, atol=1e-6)
    assert len(step._captures) == 2
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_losses_are_those_of_padded_batches_to_the_bit() -> None:
    padding = Padding([12], FILL)
    eager, compiled = gpt2(), gpt2()
    optimizer, other = (torch.optim.AdamW(m.parameters(), foreach=False) for m in (eager, compiled))
    step = olla.compile(compiled, optimizer=other, loss=loss_of, buckets=[12], fill=FILL, disk_cache=False)
    for batch in batches([5, 12, 9, 11]):
        optimizer.zero_grad()
        loss = loss_of(eager, padding.padded(batch))
        loss.backward()
        optimizer.step()
        assert torch.equal(step(batch), loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), compiled.parameters(), strict=True))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_a_batch_is_padded_to_the_next_bucket_and_keeps_what_it_had(buckets: list[int], length: int) -> None:
    batch = {"input_ids": torch.arange(2 * length).view(2, length), "weight": torch.ones(2)}
    padded = Padding(buckets, {"input_ids": -7}).padded(batch)
    longer = [n for n in buckets if n >= length]
    assert padded["input_ids"].shape == (2, min(longer, default=length))
    assert torch.equal(padded["input_ids"][:, :length], batch["input_ids"])
    assert bool((padded["input_ids"][:, length:] == -7).all())
    assert padded["weight"] is batch["weight"]
    assert batch["input_ids"].shape == (2, length)


@pytest.mark.parametrize(
    ("buckets", "fill", "batch", "message"),
    [
        ([], FILL, {}, "expected lengths"),
        ([0], FILL, {}, "expected lengths"),
        ([8], {}, {}, "buckets need fill"),
        ([8], FILL, [torch.ones(1, 2)], "expected a dict"),
        ([8], FILL, {"input_ids": torch.ones(1, 2)}, "fill names 'labels', and the batch has none"),
        ([8], FILL, {"input_ids": torch.ones(2), "labels": torch.ones(1, 2)}, "less than two dimensions"),
        ([8], FILL, {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 3)}, "differ in length"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_what_was_expected(
    buckets: list[int], fill: dict[str, float], batch: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Padding(buckets, fill).padded(batch)
