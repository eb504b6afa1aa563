"""Memory that is shared, viewed, strided or changed in place."""

from __future__ import annotations

from typing import Any

from tests.support.pytorch.programs.register import Compile, data, graded, leaf, mlp, program, trained
from tests.support.pytorch.steps import nn, torch


@program
def in_place_operators(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        y.mul_(2).add_(1)
        z = y.exp() + y
        z[:, 0] = 3
        z[:, 1:3].mul_(2)
        z.masked_fill_(z > 2, 0.5)
        return (z @ w).relu_()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def views_as_results(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ w).tanh()
        return y, y.t(), y[:, 2:5], y.view(-1), y.unsqueeze(0).expand(3, 8, 8), x.t(), (y * w).exp()[0]

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def a_result_twice_and_an_input(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * w).sin().exp()
        return y, y, x, y.detach(), (y.cos() * w).sum()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def a_result_changed_by_the_user(compile: Compile) -> list[Any]:
    """What forward returned is changed in place before backward, where eager training allows that."""
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    y, z = compile(lambda x, w: ((x * w).sum(1), (x @ w).cos()))(x, w)
    y.add_(3)
    (y.sum() * 2 + z.exp().sum()).backward()
    return [y.detach(), z.detach(), x.grad, w.grad]


class Counting(nn.Module):
    """Uses a buffer, changes it, and uses it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = (y * self.scale.clone()).sin().exp()
        self.scale.mul_(0.9).add_(y.detach().mean(0))
        self.count += 1
        w = (z * self.scale.clone()).cos() / self.count
        self.scale.add_(1)
        return w.tanh()


@program
def a_buffer_used_changed_and_used(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    return trained(compile, Counting(), [data(4, 8, seed=i) for i in range(3)])


@program
def a_changed_input(compile: Compile) -> list[Any]:
    state, w = data(8, 8).clone(), leaf(8, 8)

    def function(state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        before = (state.clone() * w).exp().sin()
        state.add_(before.detach().mean())
        return (before * (state.clone() + w)).tanh()

    results = [compile(function)(state, w)]
    results[0].sum().backward()
    return [*(r.detach() for r in results), state, w.grad]


@program
def a_changed_input_with_gradient(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)

    def function(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = (y.clone() * w).exp()
        y.mul_(w)
        return (z + y).sin()

    y = x * 2
    result = compile(function)(y, w)
    (result.sum() + y.sum()).backward()
    return [result.detach(), y.detach(), x.grad, w.grad]


@program
def a_changed_view_of_an_input(compile: Compile) -> list[Any]:
    state, w = data(8, 8).clone(), leaf(8, 8)

    def function(state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (state.clone() * w).sin().exp()
        state[2:4].add_(1)
        state.t()[1].zero_()
        return (y * state.clone()).tanh()

    result = compile(function)(state, w)
    result.sum().backward()
    return [result.detach(), state, w.grad]


@program
def two_inputs_of_one_storage(compile: Compile) -> list[Any]:
    base, w = data(16, 8).clone(), leaf(8, 8)

    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (a.clone() * w).exp()
        b.add_(1)
        return (y.sin() * b.clone()).tanh()

    result = compile(function)(base[:8], base[4:12], w)
    result.sum().backward()
    return [result.detach(), base, w.grad]


@program
def an_average_of_weights(compile: Compile) -> list[Any]:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(self.inner[0].weight, alpha=0.1)
            return self.inner(x) * self.mean.clone().sum()

    return trained(compile, Averaged(), [data(4, 8, seed=i) for i in range(3)])


@program
def strided_inputs(compile: Compile) -> list[Any]:
    base, other = leaf(8, 16), leaf(8, 1, seed=6)
    x, y = base.t()[::2], other.expand(8, 8)
    result = compile(lambda x, y: ((x @ y).sin() * x.exp()).softmax(1))(x, y)
    result.square().sum().backward()
    return [result.detach(), base.grad, other.grad]
