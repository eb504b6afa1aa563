"""Losses with a number or a network of their own, and what people change of these between steps."""

from __future__ import annotations

import copy
import math
import types
from typing import Any

from tests.odd.loops import (
    Loop,
    adam,
    at,
    conv,
    entropy,
    labelled,
    mlp,
    momentum,
    must,
    odd,
    pictures,
    rows,
    sgd,
    steady,
    train,
)
from tests.support.pytorch.steps import nn, square, torch

functional = nn.functional


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.beta = nn.Linear(6, 8), nn.Linear(4, 6), 0.0

    def forward(self, x: Any) -> Any:
        mean, spread = self.encoder(x).chunk(2, dim=1)
        posterior = torch.distributions.Normal(mean, spread.exp(), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        kl = torch.distributions.kl_divergence(posterior, prior).sum(1).mean()
        return (self.decoder(posterior.rsample()) - x).square().mean() + self.beta * kl


@must
def vae_with_an_annealed_divergence() -> Loop:
    model = Vae()
    return train(model, lambda m, x: m(x), lambda i: setattr(model, "beta", i / 5), optimizer=adam)


@odd
def vae_with_validation() -> Loop:
    model = nn.Linear(6, 8)

    def loss(model: Any, x: Any) -> Any:
        mean, spread = model(x).chunk(2, dim=1)
        return -torch.distributions.Normal(mean, spread.exp()).log_prob(x[:, :4]).mean()

    return train(model, loss)


@must
def temperature_of_gumbel_softmax_annealed() -> Loop:
    tau = [1.0]
    loss = lambda m, x: (functional.gumbel_softmax(m(x), tau=tau[0]) * torch.arange(3)).sum()  # noqa: E731
    return train(loss=loss, change=lambda i: tau.__setitem__(0, 1.0 / (i + 1)))


@must
def gumbel_softmax_made_hard() -> Loop:
    hard = [False]
    loss = lambda m, x: (functional.gumbel_softmax(m(x), hard=hard[0]) * torch.arange(3)).sum()  # noqa: E731
    return train(loss=loss, change=lambda i: hard.__setitem__(0, i in (2, 3)))


@must
def focal_loss_with_another_gamma() -> Loop:
    settings = types.SimpleNamespace(gamma=2.0)

    def loss(model: Any, batch: Any) -> Any:
        nll = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return ((1 - (-nll).exp()) ** settings.gamma * nll).mean()

    return train(loss=loss, change=lambda i: setattr(settings, "gamma", 2.0 - 0.5 * (i // 2)), batch=labelled)


@must
def label_smoothing_of_a_function_annealed() -> Loop:
    smooth = {"value": 0.1}
    loss = lambda m, b: functional.cross_entropy(m(b["x"]), b["y"], label_smoothing=smooth["value"])  # noqa: E731
    return train(loss=loss, change=lambda i: smooth.update(value=0.1 / (i + 1)), batch=labelled)


@must
def noise_of_a_schedule_added_to_inputs() -> Loop:
    scale = [1.0]
    loss = lambda m, x: square(m, x + scale[0] * torch.randn_like(x))  # noqa: E731
    return train(loss=loss, change=lambda i: scale.__setitem__(0, 0.5**i))


@must
def diffusion_with_a_table_of_noise_levels() -> Loop:
    levels = torch.linspace(0.1, 0.9, 10)

    def loss(model: Any, batch: Any) -> Any:
        noise = torch.randn_like(batch["x"])
        level = levels[batch["t"]].unsqueeze(1)
        return (model(batch["x"] * (1 - level) + noise * level) - noise).square().mean()

    model = nn.Linear(6, 6)
    batch = lambda i: {"x": rows(i), "t": torch.arange(4).add(i).remainder(10)}  # noqa: E731
    return train(model, loss, lambda i: i == 3 and levels.mul_(0.5), batch=batch)


@must
def teacher_updated_between_steps() -> Loop:
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    loss = lambda m, x: functional.mse_loss(m(x), teacher(x) + 1)  # noqa: E731

    def after(i: int, result: Any) -> None:
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), student.parameters(), strict=True):
                t.lerp_(p, 0.2)

    return train(student, loss, after=after, seen=lambda: list(teacher.parameters()))


@must
def teacher_switched_to_eval_mode() -> Loop:
    teacher = mlp(nn.Dropout(0.5)).requires_grad_(False)
    loss = lambda m, x: functional.mse_loss(m(x), teacher(x))  # noqa: E731
    return train(loss=loss, change=lambda i: teacher.train(i < 2))


@odd
def teacher_with_batch_norm_in_a_closure() -> Loop:
    teacher = mlp(nn.BatchNorm1d(8)).requires_grad_(False)
    loss = lambda m, x: functional.mse_loss(m(x), teacher(x))  # noqa: E731
    return train(loss=loss, seen=lambda: list(teacher.buffers()))


@odd
def teacher_replaced_by_a_copy_of_the_student() -> Loop:
    student = mlp()
    held = {"teacher": mlp().requires_grad_(False)}
    loss = lambda m, x: functional.mse_loss(m(x), held["teacher"](x))  # noqa: E731
    swap = lambda: held.update(teacher=copy.deepcopy(student).requires_grad_(False))  # noqa: E731
    return train(student, loss, at(3, swap))


@odd
def ema_updated_inside_the_loss_with_a_decay_of_python() -> Loop:
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    decay = [0.9]

    def loss(model: Any, x: Any) -> Any:
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(decay[0]).add_(p, alpha=1 - decay[0])
        return functional.mse_loss(model(x), teacher(x) + 1)

    return train(
        student, loss, lambda i: decay.__setitem__(0, 0.9 - 0.1 * (i // 2)), seen=lambda: list(teacher.parameters())
    )


class Queue(nn.Module):
    """Contrastive learning with a queue of negatives, whose place is a buffer or a number."""

    def __init__(self, by_buffer: bool) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("queue", functional.normalize(torch.randn(8, 3), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.by_buffer, self.number, self.temperature = by_buffer, 0, 0.5

    def forward(self, x: Any) -> Any:
        q = functional.normalize(self.body(x), dim=1)
        loss = torch.logsumexp(q @ self.queue.clone().t() / self.temperature, dim=1).mean()
        with torch.no_grad():
            if self.by_buffer:
                where = (torch.arange(4) + self.place) % 8
                self.queue.index_copy_(0, where, q)
                self.place.add_(4).remainder_(8)
            else:
                self.queue[self.number : self.number + 4] = q
                self.number = (self.number + 4) % 8
        return loss


@must
def queue_of_negatives_by_a_buffer() -> Loop:
    return train(Queue(True), lambda m, x: m(x))


@odd
def queue_of_negatives_by_a_number() -> Loop:
    model = Queue(False)
    return train(model, lambda m, x: m(x), seen=lambda: model.number)


@must
def temperature_of_contrastive_loss_annealed() -> Loop:
    model = Queue(True)
    return train(model, lambda m, x: m(x), lambda i: setattr(model, "temperature", 0.5 / (1 + i // 2)))


@must
def target_network_synchronised_every_other_step() -> Loop:
    model = mlp()
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(model: Any, batch: Any) -> Any:
        q = model(batch["x"]).gather(1, batch["y"].unsqueeze(1)).squeeze(1)
        return functional.smooth_l1_loss(q, 1 + 0.9 * target(batch["x"]).max(1).values)

    change = lambda i: i % 2 == 0 and target.load_state_dict(model.state_dict())  # noqa: E731
    return train(model, loss, change, batch=labelled)


@odd
def target_network_replaced_by_a_copy() -> Loop:
    model = mlp()
    held = [copy.deepcopy(model).requires_grad_(False)]
    loss = lambda m, x: functional.mse_loss(m(x), 1 + held[0](x))  # noqa: E731
    return train(model, loss, lambda i: i % 2 == 0 and held.__setitem__(0, copy.deepcopy(model).requires_grad_(False)))


@must
def discount_and_clip_of_ppo_annealed() -> Loop:
    settings = {"clip": 0.2, "entropy": 0.01}

    def loss(model: Any, batch: Any) -> Any:
        log_p = functional.log_softmax(model(batch["x"]), dim=1)
        ratio = (log_p.gather(1, batch["y"].unsqueeze(1)).squeeze(1) + 1).exp()
        gain = torch.minimum(ratio, ratio.clamp(1 - settings["clip"], 1 + settings["clip"])).mean()
        return -gain + settings["entropy"] * (log_p.exp() * log_p).sum(1).mean()

    return train(loss=loss, change=lambda i: settings.update(clip=0.2 + 0.3 * i, entropy=0.01 * i), batch=labelled)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.config = types.SimpleNamespace(top_k=1, noise=0.0)

    def forward(self, x: Any) -> Any:
        scores = self.gate(x) + self.config.noise * torch.randn(len(x), 3)
        kept, which = scores.topk(self.config.top_k, dim=1)
        weights = torch.zeros_like(scores).scatter(1, which, kept.softmax(1))
        return sum(weights[:, k : k + 1] * e(x) for k, e in enumerate(self.experts))


@must
def experts_with_another_top_k() -> Loop:
    model = Experts()
    return train(model, change=lambda i: setattr(model.config, "top_k", 2 if i in (2, 3) else 1))


@must
def experts_with_noise_that_ends() -> Loop:
    model = Experts()
    return train(model, change=lambda i: setattr(model.config, "noise", 0.5 if i < 2 else 0.0))


class Skipping(nn.Module):
    """Stochastic depth: blocks are scaled by 0 or 1 / keep, drawn by torch, or skipped by a list of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.keep, self.skipped = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), 0.8, set()

    def forward(self, x: Any) -> Any:
        for k, block in enumerate(self.blocks):
            if k not in self.skipped:
                x = x + block(x).tanh() * (torch.rand(()) < self.keep) / self.keep
        return x


@must
def stochastic_depth_with_another_rate() -> Loop:
    model = Skipping()
    return train(model, change=lambda i: setattr(model, "keep", 0.8 - 0.1 * i))


@must
def blocks_skipped_by_a_set() -> Loop:
    model = Skipping()
    return train(model, change=lambda i: setattr(model, "skipped", {i % 3}))


@must
def weights_of_two_losses_adapted_between_steps() -> Loop:
    weights = [1.0, 1.0]
    loss = lambda m, x: (lambda y: (weights[0] * y.square().mean() + weights[1] * y.abs().mean(), y.detach()))(m(x))  # noqa: E731
    world = train(loss=loss)
    world.after = lambda i, result: weights.__setitem__(1, 1 / (1 + result[1].abs().mean().item()))
    return world


@must
def weights_of_two_losses_learned() -> Loop:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weights = mlp(), nn.Parameter(torch.zeros(2))

        def forward(self, x: Any) -> Any:
            y = self.body(x)
            return (torch.stack((y.square().mean(), y.abs().mean())) * (-self.weights).exp() + self.weights).sum()

    return train(Both(), lambda m, x: m(x), optimizer=momentum)


@must
def swa_averaged_between_steps() -> Loop:
    model = mlp(nn.BatchNorm1d(8))
    average = torch.optim.swa_utils.AveragedModel(model)
    return train(model, after=lambda i, r: average.update_parameters(model), seen=lambda: list(average.parameters()))


@must
def siamese_with_a_margin() -> Loop:
    margin = [1.0]

    def loss(model: Any, pair: Any) -> Any:
        return functional.relu(margin[0] - (model(pair[0]) - model(pair[1])).square().sum(1)).mean()

    return train(
        loss=loss, change=lambda i: margin.__setitem__(0, 1.0 + 0.5 * (i // 2)), batch=lambda i: (rows(i), rows(i + 9))
    )


@must
def momentum_of_batch_norm_annealed_in_a_convnet() -> Loop:
    model = conv()
    return train(model, change=lambda i: setattr(model[1], "momentum", 0.1 / (i + 1)), batch=pictures)


@must
def stages_unfrozen_one_after_the_other() -> Loop:
    model = conv()
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    return train(model, change=lambda i: i >= 2 and model[4 - i].requires_grad_(True), batch=pictures, optimizer=adam)


@odd
def lazy_layers() -> Loop:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    model(rows(0))
    return train(model)


@odd
def lazy_layers_that_no_batch_has_shaped() -> Loop:
    return train(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), num_steps=3)


@must
def position_of_a_cosine_in_the_loss() -> Loop:
    trainer = types.SimpleNamespace(step=0, total=5)
    loss = lambda m, x: square(m, x) * (0.5 + 0.5 * math.cos(math.pi * trainer.step / trainer.total))  # noqa: E731
    return train(loss=loss, change=lambda i: setattr(trainer, "step", i))


@must
def two_heads_trained_in_turn() -> Loop:
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "a": nn.Linear(8, 3), "b": nn.Linear(8, 2)})
    task = ["a"]
    loss = lambda m, x: m[task[0]](m["body"](x).tanh()).square().mean()  # noqa: E731
    return train(model, loss, lambda i: task.__setitem__(0, "ab"[i % 2]), optimizer=sgd)


@steady
def classes_balanced_by_a_buffer() -> Loop:
    model = mlp()
    model.register_buffer("weight", torch.ones(3))
    loss = lambda m, b: functional.cross_entropy(m(b["x"]), b["y"], m.weight)  # noqa: E731
    return train(model, loss, lambda i: model.weight.mul_(torch.tensor([0.5, 1.0, 1.5])), batch=labelled)


@must
def predictions_logged_beside_the_loss() -> Loop:
    log: list[Any] = []
    world = train(loss=lambda m, b: (entropy(m, b), m(b["x"]).argmax(1)), batch=labelled)
    world.after, world.seen = lambda i, result: log.append(result[1].tolist()), lambda: log
    return world
