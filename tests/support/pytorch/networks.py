"""Networks that transformers does not have: VGG, a U-Net for segmentation and a small mixture of experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class VGG(nn.Module):
    """The networks of Simonyan and Zisserman 2014: convolutions of 3 x 3, three linear layers, dropout.

    Args:
        num_labels: classes.
        depths: convolutions on each of the five levels; (2, 2, 3, 3, 3) is VGG-16.
        widths: channels on each level.
        image_size: of a side.
        hidden_size: of the linear layers.
    """

    def __init__(
        self, num_labels: int, depths: Sequence[int], widths: Sequence[int], image_size: int, hidden_size: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for depth, width in zip(depths, widths, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
                before = width
            layers.append(nn.MaxPool2d(2))
        side = image_size >> len(depths)
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(before * side * side, hidden_size),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden_size, num_labels),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return an object with ``loss`` and ``logits`` [batch, num_labels]."""
        logits = self.head(self.features(pixel_values).flatten(1))
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels), logits=logits)


class UNet(nn.Module):
    """The U-Net of Ronneberger et al. 2015, with padding and batch norm.

    Args:
        num_labels: classes of a pixel.
        widths: channels on each level; an image's sides must be divisible by 2 ** (len(widths) - 1).
    """

    def __init__(self, num_labels: int, widths: Sequence[int]) -> None:
        super().__init__()
        levels = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(_block(*pair) for pair in [(3, widths[0]), *levels])
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, wide, 2, stride=2) for wide, deep in reversed(levels))
        self.merge = nn.ModuleList(_block(2 * wide, wide) for wide, _ in reversed(levels))
        self.head = nn.Conv2d(widths[0], num_labels, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return an object with ``loss`` and ``logits`` [batch, num_labels, height, width]."""
        skipped: list[torch.Tensor] = []
        x = pixel_values
        for i, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if i else x)
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], dim=1))
        logits = self.head(x)
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels), logits=logits)


def _block(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Experts(nn.Module):
    """A token-wise mixture of experts: all experts see all tokens, and the best ``num_chosen`` of each token count.

    Shapes do not depend on where tokens are sent, so the step can be captured.
    """

    def __init__(self, width: int, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take and return float32[num_tokens, width]."""
        best, chosen = self.router(tokens).softmax(-1).topk(self.num_chosen, dim=-1)
        weights = torch.zeros(len(tokens), len(self.up)).to(tokens).scatter(-1, chosen, best)
        hidden = functional.gelu(torch.einsum("td,edh->teh", tokens, self.up))
        return tokens + torch.einsum("teh,ehd,te->td", hidden, self.down, weights)
