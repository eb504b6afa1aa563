"""Bodies of training loops of one's own, and what changes in them between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.odd.loops import Loop, adam, at, mlp, momentum, must, number_at, odd, rows, steady, train
from tests.support.pytorch.steps import nn, square, torch


def body(around: Callable[[Any], Any] = lambda read: None, **hooks: Any) -> Any:
    """The body of an ordinary loop that calls what is given: prepare(x), loss(model, x), clip(model), behind(model)."""

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = hooks.get("loss", square)(model, hooks.get("prepare", lambda x: x)(x))
        loss.backward()
        result = hooks.get("clip", lambda model: None)(model)
        optimizer.step()
        hooks.get("behind", lambda model: None)(model)
        return loss if result is None else (loss, result)

    return step


@must
def norm_of_clipping_scheduled() -> Loop:
    limit = [0.01]
    step = body(clip=lambda model: clip_grad_norm_(model.parameters(), limit[0]))
    return train(body=step, change=lambda i: limit.__setitem__(0, 0.01 * (1 + i // 2)))


@must
def kind_of_norm_of_clipping_changed() -> Loop:
    settings = {"norm_type": 2.0}
    step = body(clip=lambda model: clip_grad_norm_(model.parameters(), 0.01, **settings))
    return train(body=step, change=lambda i: settings.update(norm_type=1.0 if i in (2, 3) else 2.0))


@must
def value_of_clipping_scheduled() -> Loop:
    limit = {"value": 0.01}
    step = body(clip=lambda model: clip_grad_value_(model.parameters(), limit["value"]))
    return train(body=step, change=lambda i: limit.update(value=0.01 / (1 + i)))


@must
def clipping_switched_off() -> Loop:
    trainer = type("Trainer", (), {"clips": True})()
    step = body(clip=lambda model: clip_grad_norm_(model.parameters(), 0.01) if trainer.clips else None)
    return train(body=step, change=lambda i: setattr(trainer, "clips", i < 2))


@must
def noise_on_gradients_scheduled() -> Loop:
    scale = [0.1]

    def clip(model: Any) -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=scale[0])

    return train(body=body(clip=clip), change=lambda i: scale.__setitem__(0, 0.1 / (1 + i)))


@must
def number_of_micro_batches_changed() -> Loop:
    parts = [1]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in x.chunk(parts[0]):
            loss = square(model, part) / parts[0]
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return train(body=step, change=lambda i: parts.__setitem__(0, 2 if i in (2, 3) else 1))


@must
def number_of_inner_updates_changed() -> Loop:
    inner = [1]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        for _ in range(inner[0]):
            optimizer.zero_grad()
            loss = square(model, x)
            loss.backward()
            optimizer.step()
        return loss

    return train(body=step, change=lambda i: inner.__setitem__(0, 1 + i // 2), optimizer=momentum)


@odd
def update_skipped_by_a_counter() -> Loop:
    count = [0]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = square(model, x)
        loss.backward()
        count[0] += 1
        if count[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train(body=step)


@odd
def update_skipped_by_a_flag_of_the_user() -> Loop:
    skips = [False]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        if not skips[0]:
            optimizer.step()
        return loss

    return train(body=step, change=lambda i: skips.__setitem__(0, i == 2))


@must
def sam_with_another_radius() -> Loop:
    rho = [0.05]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [rho[0] * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        square(model, x).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss

    return train(body=step, change=lambda i: rho.__setitem__(0, 0.05 * (1 + i // 2)))


@must
def weights_clamped_to_another_limit() -> Loop:
    limit = [0.2]

    def behind(model: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-limit[0], limit[0])

    return train(body=body(behind=behind), change=lambda i: limit.__setitem__(0, 0.2 / (1 + i // 2)))


@must
def decay_of_weights_by_hand_scheduled() -> Loop:
    factor = {"decay": 0.99}

    def behind(model: Any) -> None:
        for p in model.parameters():
            p.data.mul_(factor["decay"])

    return train(body=body(behind=behind), change=lambda i: factor.update(decay=0.99 - 0.1 * (i // 2)))


@odd
def average_kept_inside_the_body_with_a_decay_by_the_step() -> Loop:
    model = mlp()
    average = [p.detach().clone() for p in model.parameters()]
    count = [0]

    def behind(model: Any) -> None:
        count[0] += 1
        with torch.no_grad():
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p, 1 / (1 + count[0]))

    return train(model, body=body(behind=behind), seen=lambda: average)


@must
def adversarial_step_of_another_size() -> Loop:
    size = [0.01]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        square(model, x).backward()
        noisy = (x + size[0] * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = square(model, noisy)
        loss.backward()
        optimizer.step()
        return loss

    return train(body=step, change=lambda i: size.__setitem__(0, 0.01 * (1 + i)))


@must
def weight_of_a_gradient_penalty_scheduled() -> Loop:
    weight = [0.0]

    def loss(model: Any, x: Any) -> Any:
        x = x.detach().requires_grad_()
        value = square(model, x)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + weight[0] * slope.square().sum()

    return train(mlp(nn.Tanh()), loss, lambda i: weight.__setitem__(0, 0.5 * (i // 2)))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)


@must
def gan_with_two_compiled_steps() -> Loop:
    import olla

    model = Gan()
    second = torch.optim.SGD(model.generator.parameters(), lr=0.1, foreach=False)
    critic = lambda m, x: m.critic(m.generator(x).detach()).mean() - m.critic(x).mean()  # noqa: E731
    steps: list[Any] = []

    def fool(generator: Any, x: Any) -> Any:
        return -model.critic(generator(x)).mean()

    world = train(model, critic, optimizer=sgd_of(model.critic))

    def after(i: int, result: Any) -> None:
        x = rows(50 + i)
        if world.step is None:
            second.zero_grad()
            fool(model.generator, x).backward()
            second.step()
            return
        if not steps:
            steps.append(olla.compile(model.generator, optimizer=second, loss=fool, time_limit=0.05))
        steps[0](x)

    world.after = after
    return world


def sgd_of(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@odd
def gan_with_two_optimizers_in_one_body() -> Loop:
    model = Gan()
    second = torch.optim.SGD(model.generator.parameters(), lr=0.1, foreach=False)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = model.critic(model.generator(x).detach()).mean() - model.critic(x).mean()
        loss.backward()
        optimizer.step()
        second.zero_grad()
        (-model.critic(model.generator(x)).mean()).backward()
        second.step()
        return loss

    return train(model, body=step, optimizer=sgd_of(model.critic))


@odd
def gradients_that_add_up_over_steps() -> Loop:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return train(body=step)


@odd
def gradients_zeroed_in_place() -> Loop:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = square(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return train(body=step)


@odd
def body_that_stops_on_a_bad_loss() -> Loop:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = square(model, x)
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        loss.backward()
        optimizer.step()
        return loss

    return train(body=step, batch=lambda i: rows(i) * (float("inf") if i == 3 else 1))


@steady
def norm_of_gradients_returned() -> Loop:
    return train(body=body(clip=lambda model: clip_grad_norm_(model.parameters(), 1.0)), optimizer=adam)


@odd
def learning_rate_set_inside_the_body() -> Loop:
    rate = [0.1]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = rate[0]
        return body()(model, optimizer, x)

    return train(body=step, change=lambda i: rate.__setitem__(0, 0.1 / (1 + i)))


@odd
def learning_rate_read_by_the_body() -> Loop:
    world = train(body=lambda m, o, x: body(loss=lambda m, x: square(m, x) * o.param_groups[0]["lr"])(m, o, x))
    world.change = lambda i: world.optimizer.param_groups[0].update(lr=0.1 * number_at(i))
    return world


@odd
def body_replaced_between_steps() -> Loop:
    held = [body()]
    double = body(loss=lambda model, x: square(model, x) * 2)
    return train(body=lambda m, o, x: held[0](m, o, x), change=at(2, lambda: held.__setitem__(0, double)))


@odd
def state_of_the_optimizer_read_by_the_body() -> Loop:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        started = len(optimizer.state) > 0
        return body(loss=lambda m, x: square(m, x) * (2 if started else 1))(model, optimizer, x)

    return train(body=step, optimizer=momentum)


@must
def trainer_whose_method_is_the_body() -> Loop:
    class Trainer:
        def __init__(self) -> None:
            self.limit, self.weights, self.epoch = 0.01, {"main": 1.0}, 0

        def step(self, model: Any, optimizer: Any, x: Any) -> Any:
            optimizer.zero_grad()
            loss = square(model, x) * self.weights["main"] * (1 + self.epoch)
            loss.backward()
            clip_grad_norm_(model.parameters(), self.limit)
            optimizer.step()
            return {"loss": loss, "epoch": self.epoch}

    trainer = Trainer()

    def change(i: int) -> None:
        trainer.epoch, trainer.limit = i // 2, 0.01 * number_at(i)
        trainer.weights["main"] = number_at(i)

    return train(body=trainer.step, change=change)


@odd
def trainer_that_counts_its_steps() -> Loop:
    class Trainer:
        global_step = 0

        def step(self, model: Any, optimizer: Any, x: Any) -> Any:
            self.global_step += 1
            return body()(model, optimizer, x)

    trainer = Trainer()
    return train(body=trainer.step, seen=lambda: trainer.global_step)
