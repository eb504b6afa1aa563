"""Steps called in other ways than captured: other sizes, without gradients, in parts."""

from __future__ import annotations

from typing import Any

from tests.support.pytorch.programs.register import Compile, data, graded, leaf, mlp, program, trained
from tests.support.pytorch.steps import nn, torch


@program
def sizes_that_change(compile: Compile) -> list[Any]:
    inputs = []
    for size in (4, 6, 9):
        inputs.append(data(size, 8))
        torch._dynamo.maybe_mark_dynamic(inputs[-1], 0)
    loss = lambda m, x: (m(x) * x.shape[0] / (x.shape[0] - 1.5)).square().mean()  # noqa: E731
    return trained(compile, mlp(nn.Dropout(0.2)), inputs, loss)


@program
def sizes_inside_that_change(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        half = y.shape[0] // 2
        y = torch.cat([y[:half].exp(), y[half:] * half, y.new_ones(half, 8) * x.mean()])
        return y.view(-1, 4).cumsum(0).tanh() * float(y.shape[0])

    compiled = compile(function)
    found = []
    for size in (4, 6, 10):
        x, w = leaf(size, 8), leaf(8, 8, seed=5)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        result = compiled(x, w)
        result.sum().backward()
        found += [result.detach(), x.grad, w.grad]
    return found


@program
def inference(compile: Compile) -> list[Any]:
    model = mlp(nn.Dropout(0.2)).eval()
    compiled = compile(model)
    with torch.no_grad():
        found = [compiled(data(4, 8)), compiled(data(4, 8, seed=9))]
    with torch.inference_mode():
        found.append(compiled(data(4, 8)).clone())
    loss = compiled(data(4, 8)).sum()
    loss.backward()
    return [*found, loss.detach(), *(p.grad for p in model.parameters())]


@program
def graph_breaks(compile: Compile) -> list[Any]:
    first, second = mlp(nn.Dropout(0.2)), mlp()

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            z = self.second(y + x).exp()
            if z.sum() > 0:
                return z.tanh() * y
            return z - y

    return trained(compile, Broken(), [data(4, 8, seed=i) for i in range(2)])


@program
def a_result_that_is_not_used(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    _, second, third = compile(lambda x, w: ((x @ w).sin(), (x * w).exp().sin(), w.cos()))(x, w)
    (grad,) = torch.autograd.grad(second.sum(), w, retain_graph=False)
    return [second.detach(), third.detach(), grad]


@program
def checks_on_values(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        torch._assert_async((y < 2).all(), "too large")
        return (y + 2).log().exp()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def parameters_frozen_between_steps(compile: Compile) -> list[Any]:
    model = mlp()
    compiled = compile(lambda x: model(x).square().mean())
    found = []
    for frozen in (False, True, False):
        model[0].weight.requires_grad_(not frozen)
        loss = compiled(data(4, 8))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found
