"""The U-Net of latent diffusion: residual blocks that know the time step, and attention below the first level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

_GROUPS = 32


class DiffusionUNet(nn.Module):
    """Predicts the noise in a latent image, after Rombach et al. 2022.

    Args:
        width: channels of the first level.
        multipliers: channels of each level, in multiples of ``width``; every level halves the image.
        num_blocks: residual blocks of a level on the way down; there is one more on the way up.
        num_heads: of all attention; levels below the first attend.
    """

    def __init__(
        self,
        width: int = 192,
        multipliers: Sequence[int] = (1, 2, 3, 4),
        num_blocks: int = 2,
        num_heads: int = 8,
        num_channels: int = 4,
    ) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(num_channels, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        channels, skipped = width, [width]
        for level, multiplier in enumerate(multipliers):
            for _ in range(num_blocks):
                self.down.append(_Block(channels, width * multiplier, time, num_heads if level else 0))
                channels = width * multiplier
                skipped.append(channels)
            if level < len(multipliers) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skipped.append(channels)
        self.middle = nn.ModuleList([_Block(channels, channels, time, num_heads), _Block(channels, channels, time, 0)])
        for level, multiplier in reversed(list(enumerate(multipliers))):
            for _ in range(num_blocks + 1):
                heads = num_heads if level else 0
                self.up.append(_Block(channels + skipped.pop(), width * multiplier, time, heads))
                channels = width * multiplier
            if level:
                self.up.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.last = nn.Sequential(
            nn.GroupNorm(_GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, num_channels, 3, padding=1)
        )

    def forward(self, latent: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return float32[batch, channels, height, width] as ``latent``; ``step`` is float32[batch, width], the time."""
        time = self.time(step)
        x = self.first(latent)
        skipped = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, _Block) else layer(x)
            skipped.append(x)
        for layer in self.middle:
            x = layer(x, time)
        for layer in self.up:
            if isinstance(layer, _Block):
                x = layer(torch.cat([x, skipped.pop()], dim=1), time)
            else:
                x = layer(functional.interpolate(x, scale_factor=2.0))
        result: torch.Tensor = self.last(x)
        return result


class _Block(nn.Module):
    """A residual block, and attention over the image behind it if it has heads."""

    def __init__(self, before: int, after: int, time: int, num_heads: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.GroupNorm(_GROUPS, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, after))
        self.leave = nn.Sequential(nn.GroupNorm(_GROUPS, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.num_heads = num_heads
        if num_heads:
            self.norm = nn.GroupNorm(_GROUPS, after)
            self.queries_keys_values = nn.Conv1d(after, 3 * after, 1)
            self.out = nn.Conv1d(after, after, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inside = self.leave(self.enter(x) + self.time(time)[:, :, None, None])
        x = self.skip(x) + inside
        return x + self._attend(x) if self.num_heads else x

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(2)
        heads = self.queries_keys_values(flat).unflatten(1, (3, self.num_heads, -1)).transpose(-1, -2)
        seen = functional.scaled_dot_product_attention(*heads.unbind(1))
        result: torch.Tensor = self.out(seen.transpose(-1, -2).flatten(1, 2)).view_as(x)
        return result
