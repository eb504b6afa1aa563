"""Gradients that are more than one backward: functions of one's own, checkpoints, hooks, second derivatives."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.checkpoint import checkpoint

from tests.support.pytorch.programs.register import Compile, data, graded, leaf, mlp, program, trained
from tests.support.pytorch.steps import nn, torch


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).exp().clamp(max=5)
        ctx.save_for_backward(x, w, y)
        mask = y > 1
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, w, y = ctx.saved_tensors
        scaled = grad * y * 1.5
        return scaled @ w.t(), x.t() @ scaled


@program
def a_custom_function(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, mask = Steep.apply(x.sin(), w)
        return torch.where(mask, y.cos(), y * 2).exp()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


class Noisy(torch.autograd.Function):
    """Draws in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * torch.rand_like(x) + torch.randn_like(grad)


@program
def a_custom_function_that_draws_in_backward(compile: Compile) -> list[Any]:
    torch.manual_seed(7)
    found = graded(compile, lambda x: (Noisy.apply(x.exp()) * torch.rand_like(x)).tanh(), leaf(8, 8))
    return [*found, torch.rand(1)]


@program
def checkpoints(compile: Compile) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, x + y, use_reentrant=False).exp()

    return trained(compile, Checkpointed(), [data(4, 8, seed=i) for i in range(2)])


@program
def a_checkpoint_with_dropout(compile: Compile) -> list[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(nn.Dropout(0.4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    return trained(compile, Checkpointed(), [data(16, 8, seed=i) for i in range(2)])


@program
def gradients_that_are_off_for_a_part(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = (x @ w).softmax(1)
        y = (x @ w).sin().exp()
        return (y - target).square() * y.detach() + (x * w).detach()

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


@program
def forward_without_backward(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    compiled = compile(lambda x, w: ((x @ w).sin().exp() * w).tanh())
    first, second = compiled(x, w), compiled(x * 2, w)
    del first
    third = compiled(x, w * 3)
    third.sum().backward()
    second.sum().backward()
    return [second.detach(), third.detach(), x.grad, w.grad]


@program
def backward_twice(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    with torch._functorch.config.patch(donated_buffer=False):
        result = compile(lambda x, w: ((x @ w).sin().exp() * w).tanh())(x, w)
        result.sum().backward(retain_graph=True)
        (result * 2).sum().backward()
    return [result.detach(), x.grad, w.grad]


@program
def derivatives_inside(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: ((row @ w).sin().exp()).sum()))(x)
        return slopes.tanh() * x

    return graded(compile, function, leaf(8, 8), leaf(8, 8, seed=5))


class Seen(torch.autograd.Function):
    """Counts in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.count = count
        ctx.save_for_backward(x)
        count.add_(1)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.count.add_(10)
        return grad * x.exp(), None


@program
def a_buffer_changed_in_backward(compile: Compile) -> list[Any]:
    count, x = torch.zeros(()), leaf(8, 8)
    result = compile(lambda x, count: Seen.apply(x.sin(), count).tanh() * x)(x, count)
    result.sum().backward()
    return [result.detach(), count, x.grad]


@program
def hooks(compile: Compile) -> list[Any]:
    x, w = leaf(8, 8), leaf(8, 8, seed=5)
    w.register_hook(lambda grad: grad * 2)
    result = compile(lambda x, w: ((x @ w).sin().exp() * w).tanh())(x, w)
    result.register_hook(lambda grad: grad.cos())
    result.sum().backward()
    return [result.detach(), x.grad, w.grad]


@program
def a_second_derivative(compile: Compile) -> list[Any]:
    """Refused by compiled code, whoever divides the graph."""
    x = leaf(8, 8)
    (first,) = torch.autograd.grad(compile(lambda x: (x.sin().exp() * x).tanh())(x).sum(), x, create_graph=True)
    with contextlib.suppress(RuntimeError):
        first.sum().backward()
    return [first.detach()]
