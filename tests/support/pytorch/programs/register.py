"""What a program is, the register of all of them, and what most of them call.

A program takes what compiles a function, runs a few steps and returns every tensor a user could look at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.pytorch.steps import nn, torch

Compile = Callable[[Any], Any]
Program = Callable[[Compile], list[Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaf(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def data(*shape: int, seed: int = 4) -> torch.Tensor:
    return leaf(*shape, seed=seed).detach()


def mlp(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), *middle, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def trained(compile: Compile, model: nn.Module, inputs: list[Any], loss: Any = None) -> list[Any]:
    """Train for a step per input: losses, and what they make of parameters, gradients and buffers."""
    loss = loss or (lambda model, x: model(x).square().mean())
    step = compile(lambda *args: loss(model, *args))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for given in inputs:
        optimizer.zero_grad()
        result = step(*(given if isinstance(given, tuple) else (given,)))
        result.backward()
        optimizer.step()
        losses.append(result.detach())
    return [*losses, *parameters, *(p.grad for p in parameters), *model.buffers()]


def graded(compile: Compile, function: Any, *args: torch.Tensor) -> list[Any]:
    """Call a function of tensors, and differentiate everything it returns."""
    results = compile(function)(*args)
    results = results if isinstance(results, tuple) else (results,)
    sum(r.sum() * (i + 2) for i, r in enumerate(results) if r.requires_grad).backward()
    return [*(r.detach() for r in results), *(a.grad for a in args)]


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Run a block with a random state of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        yield
