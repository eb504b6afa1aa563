"""Layers, operators and number types that a rewriting may get wrong."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from tests.support.pytorch.programs.register import Compile, data, graded, leaf, mlp, program, trained
from tests.support.pytorch.steps import nn, torch


@program
def dropout(compile: Compile) -> list[Any]:
    return trained(compile, mlp(nn.Dropout(0.3)), [data(16, 8, seed=i) for i in range(3)])


@program
def batch_norm(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2)
    return trained(compile, nn.Sequential(*layers, nn.BatchNorm2d(4)), [data(2, 3, 8, 8, seed=i) for i in range(3)])


@program
def batch_norm_called_twice(compile: Compile) -> list[Any]:
    norm = nn.BatchNorm1d(8)
    return trained(compile, norm, [data(16, 8)], lambda m, x: (m(x).sin() * m(x.cos()).exp()).mean())


@program
def channels_last(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.GELU(), nn.ConvTranspose2d(4, 4, 3), nn.GroupNorm(2, 4), nn.AvgPool2d(2)
    return trained(compile, nn.Sequential(*layers), [data(2, 3, 8, 8).to(memory_format=torch.channels_last)])


@program
def tied_weights(compile: Compile) -> list[Any]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.inner = nn.Embedding(64, 8), mlp(nn.Dropout(0.1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            return (x + self.inner(x)) @ self.embedding.weight.t()

    tokens = torch.arange(32).view(4, 8) * 7 % 64
    loss = lambda m, t: functional.cross_entropy(m(t).flatten(0, 1), t.flatten())  # noqa: E731
    return trained(compile, Tied(), [tokens, tokens.flip(0)], loss)


@program
def draws_of_many_kinds(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.randn(8, 8)
        y = y.sin() + torch.randint(0, 5, (8, 8)) * x + torch.normal(0.0, 1.0, (8, 8))
        return (functional.dropout(y.exp(), 0.5) * torch.randperm(8)).tanh() + functional.rrelu(y, training=True)

    torch.manual_seed(9)
    return [*graded(compile, function, leaf(8, 8)), torch.rand(1)]


@program
def gathers_and_scatters(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values, index = (x @ w).sin().topk(4, 1)
        y = torch.zeros_like(x).scatter_add(1, index, values.exp())
        y = y.index_put((index[0], index[1]), values[0], accumulate=True)
        return y.gather(1, index) + x.sort(1).values[:, :4] * x.argmax(1, keepdim=True) + y.cummax(1).values[:, :4]

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def attention(compile: Compile) -> list[Any]:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = model(x).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).exp().mean()

    torch.manual_seed(0)
    return trained(compile, nn.Linear(16, 48), [data(2, 4, 16)], loss)


@program
def autocast(compile: Compile) -> list[Any]:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    return trained(compile, mlp(), [data(4, 8)], loss)


@program
def a_recurrence(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    cell = nn.GRUCell(8, 8)

    def loss(cell: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 8)
        for step in x.unbind():
            state = cell(step, state)
        return state.exp().mean()

    return trained(compile, cell, [data(5, 4, 8)], loss)


@program
def complex_numbers(compile: Compile) -> list[Any]:
    return graded(compile, lambda x, w: torch.fft.irfft(torch.fft.rfft(x.sin()) * w.sum()).exp(), leaf(8, 8), leaf(4))


@program
def empty_and_single_elements(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * s).sin().exp(), (x.sum() + s).cos(), torch.cat([x, s.view(1, 1).expand(1, 8).exp()])

    return graded(compile, function, leaf(0, 8), leaf(1).squeeze().detach().requires_grad_())


@program
def double_precision_and_halves(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x.double() @ w.double()).sin().exp()
        return (y.to(torch.bfloat16).float() * x).to(torch.float64).tanh() + (y > 1) * y.round().to(torch.int32)

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))
