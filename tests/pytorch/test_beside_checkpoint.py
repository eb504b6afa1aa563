"""Plans beside torch's own checkpoints of the same blocks: never more memory at no more added time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import olla

NUM_BLOCKS, WIDTH = 5, 16
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": lambda p: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
}


class MLP(nn.Module):
    size: tuple[int, ...] = (512, WIDTH)

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias), nn.Linear(4 * WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    size = (4, 64, WIDTH)

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH, bias=bias),
            *(nn.Linear(WIDTH, n * WIDTH, bias) for n in (3, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(4, 64, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Convolutions(nn.Module):
    size = (2, WIDTH, 16, 16)

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1, bias=bias),
            nn.Conv2d(2 * WIDTH, WIDTH, 1, bias=bias),
        )
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class LSTM(nn.Module):
    size = (64, WIDTH)

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        for _ in range(4):
            h, c = self.cell(x, (h, c))
        return x + h


class UNet(nn.Module):
    size = (2, WIDTH, 16, 16)

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bias),
            nn.Conv2d(2 * WIDTH, WIDTH, 1, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.left(F.avg_pool2d(x, 2)))
        return x + self.right(torch.cat([x, F.interpolate(y, scale_factor=2.0)], 1))


class Net(nn.Module):
    """Blocks one after the other; a rollout has one block that runs several times."""

    def __init__(self, kind: type[nn.Module], bias: bool, saves: bool) -> None:
        super().__init__()
        blocks = [kind(bias) for _ in range(1 if kind in (LSTM, UNet) else NUM_BLOCKS)]
        self.blocks, self.saves = nn.ModuleList(blocks), saves

    def forward(self, x: Tensor) -> Tensor:
        for i in range(NUM_BLOCKS):
            block = self.blocks[i % len(self.blocks)]
            x = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
        return x


def graph_of(kind: type[nn.Module], optimizer: str, bias: bool, saves: bool) -> olla.Graph:
    net, x = Net(kind, bias, saves), torch.zeros(kind.size)
    made = OPTIMIZERS[optimizer](net.parameters())
    return olla.capture(net, x, optimizer=made, loss=lambda m, x: m(x).square().mean()).graph


CASES = [(kind, name, True) for kind in (MLP, Attention, Convolutions, LSTM, UNet) for name in ("AdamW", "NAdam")]
CASES += [(MLP, name, bias) for name, bias in (("SGD", True), ("momentum", False), ("Adam", True), ("AdamW", False))]


@pytest.mark.parametrize(("kind", "optimizer", "bias"), CASES)
def test_no_checkpoint_of_blocks_needs_less_at_as_much_time(kind: type[nn.Module], optimizer: str, bias: bool) -> None:
    plain, saving = (graph_of(kind, optimizer, bias, saves) for saves in (False, True))
    seconds, more = (float(olla.graph.profile_of("a100").op_seconds(graph).sum()) for graph in (plain, saving))
    plan = olla.plan(plain, max_slowdown=max(more / seconds - 1, 0.0), layout=False)
    program = olla.plan(saving, method="program", layout=False)
    assert plan.peak_bytes <= program.program_peak_bytes
