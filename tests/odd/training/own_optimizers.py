"""Optimizers of one's own, wrappers around optimizers, and what a step was compiled of replaced."""

from __future__ import annotations

import math
from typing import Any

from tests.odd.loops import Loop, at, mlp, must, number_at, odd, remedied, rows, train
from tests.support.pytorch.steps import nn, square, torch


def stepped(world: Loop) -> Loop:
    """The same behind one ordinary step, which makes the optimizer's state."""
    world.optimizer.param_groups[0].setdefault("foreach", False)
    world.plain(rows(99))
    return world


class Own(torch.optim.Optimizer):
    """Signs of gradients, scaled by a mean and by Python attributes; a counter if asked for."""

    def __init__(self, parameters: Any, lr: float = 0.01, counts: bool = False) -> None:
        super().__init__(parameters, {"lr": lr})
        self.scale, self.counts, self.number = 1.0, counts, 0
        self.config = {"power": 1}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.counts:
            self.number += 1
        factor = self.scale * (1 + self.number)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.add_(p.grad.sign() * mean.abs() ** self.config["power"], alpha=-group["lr"] * factor)


@must
def attribute_of_an_own_optimizer() -> Loop:
    world = stepped(train(optimizer=Own))
    world.change = lambda i: setattr(world.optimizer, "scale", number_at(i))
    return world


@must
def dict_of_an_own_optimizer() -> Loop:
    world = stepped(train(optimizer=Own))
    world.change = lambda i: world.optimizer.config.update(power=2 if i in (2, 3) else 1)
    return world


@odd
def counter_of_an_own_optimizer() -> Loop:
    world = stepped(train(optimizer=lambda p: Own(p, counts=True)))
    world.seen = lambda: world.optimizer.number
    return world


@odd
def own_optimizer_without_any_state() -> Loop:
    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign() * group["lr"])

    return stepped(train(optimizer=lambda p: Signs(p, {"lr": 0.01})))


@odd
def step_of_an_optimizer_patched_on_the_instance() -> Loop:
    world = stepped(train(optimizer=Own))

    def patch() -> None:
        original = world.optimizer.step
        world.optimizer.step = lambda closure=None: [original(), original()].clear()

    world.change = at(2, patch)
    return world


@odd
def optimizer_that_counts_in_its_group() -> Loop:
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "k": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["k"] += 1
                for p in group["params"]:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.add_(mean, alpha=-group["lr"] / group["k"])

    world = stepped(train(optimizer=Counting))
    world.seen = lambda: world.optimizer.param_groups[0]["k"]
    return world


@odd
def optimizer_that_counts_in_its_state_by_numbers() -> Loop:
    class Decaying(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["k"] = state.get("k", 0) + 1
                    p.add_(p.grad, alpha=-group["lr"] / math.sqrt(state["k"]))

    return stepped(train(optimizer=Decaying))


@odd
def lookahead_around_an_optimizer_in_the_body() -> Loop:
    slow: list[Any] = []
    counter = [0]

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        counter[0] += 1
        if counter[0] % 2 == 0:
            with torch.no_grad():
                for p, s in zip(model.parameters(), slow, strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)
        return loss

    world = train(body=body)
    slow += [p.detach().clone() for p in world.model.parameters()]
    world.seen = lambda: (counter[0], slow)
    return world


@must
def lookahead_between_steps() -> Loop:
    world = train()
    slow = [p.detach().clone() for p in world.model.parameters()]

    def after(i: int, result: Any) -> None:
        if i % 2:
            with torch.no_grad():
                for p, s in zip(world.model.parameters(), slow, strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)

    world.after, world.seen = after, lambda: slow
    return world


@odd
def optimizer_of_the_step_replaced() -> Loop:
    world = train()
    other = torch.optim.SGD(world.model.parameters(), lr=0.01, momentum=0.5, foreach=False)

    def replace() -> None:
        world.optimizer = other
        if world.step is not None:
            with remedied("the optimizer of a compiled step cannot be replaced; compile again"):
                world.step.optimizer = other

    world.change = at(2, replace)
    return world


@odd
def model_of_the_step_replaced() -> Loop:
    world = train()
    other = mlp(nn.Tanh())

    def replace() -> None:
        world.model = other
        if world.step is not None:
            with remedied("the model of a compiled step cannot be replaced; compile again"):
                world.step.model = other

    world.change = at(2, replace)
    return world


@odd
def loss_of_the_step_replaced() -> Loop:
    world = train()
    other = lambda model, x: model(x).abs().mean()  # noqa: E731

    def replace() -> None:
        world.loss = other
        if world.step is not None:
            with remedied("the loss of a compiled step cannot be replaced; compile again"):
                world.step.loss = other

    world.change = at(2, replace)
    return world
