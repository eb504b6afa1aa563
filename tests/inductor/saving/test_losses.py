"""Losses that people train with, in chunks of rows: their gradients are those of the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn import functional as F

from olla.inductor.saving import chunked
from olla.inductor.settings import patches
from olla.inductor.simulate.step import replay
from tests.support.pytorch.compiling import LEAST, fresh, without_kernels  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("error:chunked_loss"),  # as is warned of a loss that stays whole
]

COLUMNS, WIDTH, BATCH, LENGTH = 67, 8, 4, 6
ROWS = BATCH * LENGTH
Loss = Callable[[torch.Tensor], Any]


def drawn(make: Callable[..., torch.Tensor], *sizes: Any, **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(sum(map(ord, str(sizes))))
    return make(*sizes, **kwargs)


LABELS = drawn(torch.randint, COLUMNS, (ROWS,))
IGNORED = torch.where(torch.arange(ROWS) < 5, -100, LABELS)
PER_ROW = drawn(torch.randn, ROWS, dtype=torch.float64)
MASK = (drawn(torch.rand, BATCH, LENGTH) > 0.3).double()
TEACHER = drawn(torch.randn, ROWS, COLUMNS, dtype=torch.float64)
CLASSES = torch.linspace(0.5, 1, COLUMNS, dtype=torch.float64)


def by_sequence(z: torch.Tensor) -> torch.Tensor:
    return z.view(BATCH, LENGTH, -1)


def log_probability(z: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(z, -1).gather(-1, LABELS[:, None])[:, 0]


def by_difference(z: torch.Tensor) -> torch.Tensor:
    return z.gather(-1, LABELS[:, None])[:, 0] - z.logsumexp(-1)


def ratio(logp: torch.Tensor) -> torch.Tensor:
    return -((logp - logp.detach()).exp() * PER_ROW).mean()


def preferred(z: torch.Tensor) -> torch.Tensor:
    """Sums per sequence, in pairs (DPO)."""
    logp = F.log_softmax(by_sequence(z)[:, :-1], -1).gather(-1, LABELS.view(BATCH, LENGTH)[:, 1:, None])[..., 0]
    scores = (logp * MASK[:, 1:]).sum(-1)
    return -F.logsigmoid(0.1 * (scores[:2] - scores[2:])).mean()


def clipped(z: torch.Tensor) -> torch.Tensor:
    """A clipped ratio with entropy beside it (PPO)."""
    logp = F.log_softmax(z, -1)
    chosen = logp.gather(-1, LABELS[:, None])[:, 0]
    change = (chosen - 0.9 * chosen.detach()).exp()
    entropy = -(logp.exp() * logp).sum(-1)
    return -torch.min(change * PER_ROW, change.clamp(0.8, 1.2) * PER_ROW).mean() - 0.01 * entropy.mean()


def focal(z: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(z, LABELS, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def distilled(z: torch.Tensor) -> torch.Tensor:
    gap = F.log_softmax(TEACHER, -1) - F.log_softmax(z / 2, -1)
    return (torch.softmax(TEACHER, -1) * gap).sum(-1).mean()


def per_sequence(z: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(z, LABELS, reduction="none").view(BATCH, LENGTH)
    return ((each * MASK).sum(1) / MASK.sum(1)).mean()


LOSSES: dict[str, Loss] = {
    "smoothing": lambda z: F.cross_entropy(z, IGNORED, label_smoothing=0.1),
    "class weights": lambda z: F.cross_entropy(z, LABELS, weight=CLASSES),
    "both": lambda z: F.cross_entropy(z, IGNORED, weight=CLASSES, label_smoothing=0.1),
    "row weights": lambda z: (F.cross_entropy(z, LABELS, reduction="none") * PER_ROW).mean(),
    "log_softmax, gather": lambda z: -log_probability(z).mean(),
    "ratio (GRPO)": lambda z: ratio(log_probability(z)),
    "gather - logsumexp": lambda z: ratio(by_difference(z)),
    "soft cap": lambda z: F.cross_entropy(30 * torch.tanh(z / 30), LABELS),
    "z-loss": lambda z: F.cross_entropy(z, LABELS) + 1e-4 * z.logsumexp(-1).square().mean(),
    "shifted rows": lambda z: F.cross_entropy(z[:-1], LABELS[1:]),
    "shifted": lambda z: F.cross_entropy(by_sequence(z)[:, :-1].flatten(0, 1), LABELS.view(BATCH, -1)[:, 1:].flatten()),
    "a part, and all": lambda z: (
        F.cross_entropy(by_sequence(z)[:, 2:-1].flatten(0, 1), LABELS[:12]) + 1e-3 * z.logsumexp(-1).square().mean()
    ),
    "distillation": lambda z: F.kl_div(F.log_softmax(z, -1), torch.softmax(TEACHER, -1), reduction="batchmean"),
    "temperature": distilled,
    "pairs (DPO)": preferred,
    "clipped (PPO)": clipped,
    "focal": focal,
    "per sequence": per_sequence,
    "fewer columns": lambda z: F.cross_entropy(z[:, :60], LABELS.clamp(max=59)),
    "all columns": lambda z: F.binary_cross_entropy_with_logits(z, torch.sigmoid(TEACHER)),
    "squared": lambda z: F.cross_entropy(z, LABELS) ** 2,
    "accuracy beside": lambda z: (F.cross_entropy(z, LABELS), (z.argmax(-1) == LABELS).double().mean()),
}


class Head(nn.Module):
    def __init__(self, width: int = WIDTH, columns: int = COLUMNS, *, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, columns, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = self.head(F.gelu(self.body(x)))
        return z


def gradients(model: nn.Module, loss: Loss, x: torch.Tensor, backend: Any = None) -> list[Any]:
    model.zero_grad()

    def step(x: torch.Tensor) -> Any:
        return loss(model(x))

    found = (torch.compile(step, backend=backend) if backend else step)(x)
    (found[0] if isinstance(found, tuple) else found).backward()
    return [found, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_chunks_are_those_of_the_whole_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide: list[int] = []
    in_chunks = chunked.in_chunks

    def watch(module: Any, number: int | str) -> tuple[int, str]:
        found = in_chunks(module, number)
        made = [
            n for n in module.graph.nodes if n.op == "call_function" and n.target is not torch.ops.aten.expand.default
        ]
        wide.append(sum(getattr(n.meta.get("val"), "shape", ()) == (ROWS, COLUMNS) for n in made))
        return found

    monkeypatch.setattr(chunked, "in_chunks", watch)
    torch.manual_seed(1)
    model, x = Head().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    options = patches(**LEAST, chunked_loss=5)
    found = gradients(model, LOSSES[name], x, without_kernels(options["custom_partitioner_fn"]))
    assert wide == [0]
    torch.testing.assert_close(found, gradients(model, LOSSES[name], x), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["both", "shifted", "soft cap", "ratio (GRPO)", "distillation", "all columns"])
def test_in_16_bits_gradients_in_chunks_are_as_close(name: str, bias: bool) -> None:
    torch.manual_seed(1)
    model, x = Head(bias=bias).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    exact = gradients(model, LOSSES[name], x)[1:]
    short, x = model.bfloat16(), x.bfloat16()

    def away(backend: Any) -> list[float]:
        found = gradients(short, lambda z: LOSSES[name](z.float().double()), x, backend)[1:]
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    chunks = away(without_kernels(patches(**LEAST, chunked_loss=5)["custom_partitioner_fn"]))
    assert all(few < 2 * whole + 2**-7 for few, whole in zip(chunks, away(None), strict=True))


@pytest.mark.parametrize(
    ("kind", "bias", "dtype"),
    [
        ("a factor for all", False, torch.float32),
        ("a factor for all", True, torch.float32),
        ("a factor for all", True, torch.bfloat16),
        ("a gradient per row", True, torch.float32),
    ],
)
def test_no_more_than_a_chunk_of_logits_is_in_memory(kind: str, bias: bool, dtype: torch.dtype) -> None:
    rows, columns, width = 1024, 8192, 64
    labels, weights = drawn(torch.randint, columns, (rows,)), drawn(torch.randn, rows)
    model, x = Head(width, columns, bias=bias).to(dtype), torch.randn(rows, width, dtype=dtype)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z = model(x)
        if kind == "a factor for all":
            return F.cross_entropy(z, labels)
        each = z.gather(-1, labels[:, None])[:, 0] - z.logsumexp(-1)
        return -((each - each.detach()).exp() * weights).mean()

    whole, few = (replay(model, x, loss, backend="olla", options={"chunked_loss": n}) for n in (1, 8))
    logits, product = rows * columns * dtype.itemsize, 2 * rows * columns * width
    assert whole.peak_bytes - whole.resident_bytes > logits
    assert few.peak_bytes - few.resident_bytes < logits / 3
    assert few.recomputed_flops < (0.1 if kind == "a factor for all" else 1.1) * product  # the logits, once more
