"""Training steps of other shapes than tests/support/pytorch/models.py has: speech, tables, adapters, masked images."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.support.pytorch import models


class _Sizes(NamedTuple):
    """Width, layers, and rows of each table or tokens of each sequence."""

    width: int
    layers: int
    rows: int


_FULL = {
    "whisper": _Sizes(384, 4, 200),
    "dlrm": _Sizes(64, 8, 20_000),
    "lora": _Sizes(768, 12, 256),
    "mae": _Sizes(384, 6, 196),
}
_TINY = {
    "whisper": _Sizes(32, 2, 16),
    "dlrm": _Sizes(16, 3, 100),
    "lora": _Sizes(32, 2, 16),
    "mae": _Sizes(32, 2, 16),
}
NAMES = tuple(_FULL)


def build(name: str, batch_size: int, *, tiny: bool = False) -> models.Example:
    """Make a model of NAMES in training mode on the CPU, with a batch and its loss."""
    sizes = (_TINY if tiny else _FULL)[name]
    if name == "whisper":
        from tests.support.pytorch.programs import families

        width, layers, length = sizes
        whisper, batch = families.family(
            name, checkpointed=False, width=width, layers=layers, batch=batch_size, length=length
        )
        return models.Example(whisper, batch, families.loss_of)
    if name == "lora":
        example = models.build("llama_100m", batch_size, tiny=tiny, length=sizes.rows, device="cpu")
        _adapt(example.model)
        return example
    if name == "dlrm":
        tables = {f"table{i}": torch.randint(sizes.rows, (batch_size,)) for i in range(sizes.layers)}
        numbers, clicked = torch.randn(batch_size, 13), torch.randint(2, (batch_size,)).float()
        batch = {"numbers": numbers, "clicked": clicked, **tables}
        return models.Example(Recommender(*sizes), batch, _output)
    side = 16 * int(sizes.rows**0.5)
    return models.Example(MaskedAutoencoder(*sizes), {"pixels": torch.randn(batch_size, 3, side, side)}, _output)


def _output(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)
    return loss


class Recommender(nn.Module):
    """The network of Naumov et al. 2019 (DLRM): a table of vectors for each category, and products of all pairs.

    Args:
        width: of a vector.
        num_tables: categories.
        num_rows: of each table; its gradient is dense.
    """

    def __init__(self, width: int, num_tables: int, num_rows: int) -> None:
        super().__init__()
        num_pairs = (num_tables + 1) * num_tables // 2
        self.tables = nn.ModuleList(nn.Embedding(num_rows, width) for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + num_pairs, 512), nn.ReLU(), nn.Linear(512, 1))
        self.register_buffer("pairs", torch.tril_indices(num_tables + 1, num_tables + 1, -1), persistent=False)

    def forward(self, numbers: torch.Tensor, clicked: torch.Tensor, **categories: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch: float32[batch, 13], float32[batch], and int64[batch] for each table."""
        dense = self.bottom(numbers)
        found = [table(categories[f"table{i}"]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


class MaskedAutoencoder(nn.Module):
    """The training of He et al. 2021 (MAE): a random quarter of the patches is encoded, and the others are predicted.

    Args:
        width: of the encoder; the decoder has half of it, and two layers.
        num_layers: of the encoder.
        num_patches: of an image, 16 pixels a side each.
    """

    def __init__(self, width: int, num_layers: int, num_patches: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 16, stride=16)
        self.places = nn.Parameter(torch.randn(num_patches, width) * 0.02)
        self.encoder = nn.ModuleList(_block(width) for _ in range(num_layers))
        self.between = nn.Linear(width, width // 2)
        self.absent = nn.Parameter(torch.zeros(width // 2))
        self.places_again = nn.Parameter(torch.randn(num_patches, width // 2) * 0.02)
        self.decoder = nn.ModuleList(_block(width // 2) for _ in range(2))
        self.head = nn.Linear(width // 2, 3 * 16 * 16)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the loss of float32[batch, 3, side, side]."""
        patches = functional.unfold(pixels, 16, stride=16).transpose(1, 2)
        tokens = self.embed(pixels).flatten(2).transpose(1, 2) + self.places
        shuffled = torch.rand(tokens.shape[:2], device=tokens.device).argsort(1)
        num_kept = tokens.shape[1] // 4
        kept = shuffled[:, :num_kept, None]
        seen = tokens.gather(1, kept.expand(-1, -1, tokens.shape[2]))
        for block in self.encoder:
            seen = block(seen)
        seen = self.between(seen)
        all_tokens = self.absent.expand(*tokens.shape[:2], -1)
        all_tokens = all_tokens.scatter(1, kept.expand(-1, -1, seen.shape[2]), seen) + self.places_again
        for block in self.decoder:
            all_tokens = block(all_tokens)
        error = (self.head(all_tokens) - patches).square().mean(2)
        return error.gather(1, shuffled[:, num_kept:]).mean()


def _block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)


class Adapted(nn.Module):
    """The layer of Hu et al. 2021 (LoRA): frozen weights, and a product of two small matrices beside them."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take float[..., in_features], and return float[..., out_features]."""
        result: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return result


def _adapt(model: Any) -> None:
    """Freeze a llama, and train what is beside its queries and values."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = Adapted(attention.q_proj), Adapted(attention.v_proj)
