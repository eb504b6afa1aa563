"""Loops of many fields around a wrapped model: two lines more, and equal to the bit."""

from __future__ import annotations

import collections
import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.aten.loops import GOALS, assert_same, fresh  # noqa: F401
from tests.support.pytorch.steps import nn, torch

pytestmark = pytest.mark.torch
functional = torch.nn.functional
einops = pytest.importorskip("einops")


def trained(loss: Callable[[Any, int], Any], steps: int = 4, after: Callable[[Any], None] | None = None) -> Any:
    """Return a loop with AdamW, clipping and a schedule, that calls what is given after each step."""

    def loop(model: Any) -> list[Any]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, 1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1)
        losses = []
        for i in range(steps):
            found = loss(model, i)
            optimizer.zero_grad()
            found.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            if after is not None:
                after(model)
            losses.append(found.detach())
        return losses

    return loop


class Denoiser(nn.Module):
    """A U-Net of one level that is told the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.down, self.middle = nn.Embedding(10, 16), nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16)
        self.attention, self.up = nn.Linear(16, 48), nn.Conv2d(19, 3, 3, padding=1)

    def forward(self, x: Any, time: Any) -> Any:
        h = functional.silu(self.middle(self.down(x) + einops.rearrange(self.time(time), "b c -> b c 1 1")))
        rows = einops.rearrange(h, "b c h w -> b (h w) c")
        q, k, v = einops.rearrange(self.attention(rows), "b n (three heads d) -> three b heads n d", three=3, heads=2)
        mixed = einops.rearrange(functional.scaled_dot_product_attention(q, k, v), "b heads n d -> b n (heads d)")
        h = h + einops.rearrange(mixed, "b (h w) c -> b c h w", h=h.shape[2])
        return self.up(torch.cat([x, functional.interpolate(h, scale_factor=2, mode="bilinear")], 1))


def denoised(model: Any, _: int) -> Any:
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 10), 0)
    x, time = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    noise, share = torch.randn_like(x), einops.rearrange(kept[time], "b -> b 1 1 1")
    return functional.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time), noise)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Any, action: Any = None) -> Any:
        choice = torch.distributions.Categorical(logits=self.actor(x))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(x).squeeze(-1)


def clipped_policy(model: Any, _: int) -> Any:
    states = torch.randn(16, 4)
    with torch.no_grad():
        action, before, _, value = model(states)
    advantage = torch.randn(16)
    _, now, entropy, estimate = model(states, action)
    ratio = (now - before).exp()
    policy = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    return policy + 0.5 * (estimate - value - advantage).square().mean() - 0.01 * entropy.mean()


def q_learning() -> Any:
    memory: Any = collections.deque(maxlen=32)
    chooses, targets = random.Random(0), []

    def loss(model: Any, _: int) -> Any:
        if not targets:
            targets.append(copy.deepcopy(model))
        for _ in range(8):
            state = torch.randn(4)
            with torch.no_grad():
                action = int(model(state[None]).argmax()) if chooses.random() > 0.3 else chooses.randrange(2)
            memory.append((state, action, torch.randn(4), float(action)))
        state, action, then, reward = zip(*chooses.sample(list(memory), 8), strict=True)
        now = model(torch.stack(state)).gather(1, torch.tensor(action)[:, None])
        with torch.no_grad():
            best = targets[0](torch.stack(then)).amax(1)
        return functional.smooth_l1_loss(now[:, 0], torch.tensor(reward) + 0.9 * best)

    def follow(model: Any) -> None:
        with torch.no_grad():
            for target, p in zip(targets[0].parameters(), model.parameters(), strict=True):
                target.lerp_(p, 0.1)

    return trained(loss, after=follow)


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.3)

    def forward(self, x: Any, edges: Any) -> Any:
        for layer in (self.first, self.second):
            h = layer(self.drop(x))
            x = torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]]).relu()
        return functional.log_softmax(x, 1)


def nodes(model: Any, i: int) -> Any:
    source = torch.Generator().manual_seed(0)
    x, edges = torch.randn(20, 8, generator=source), torch.randint(20, (2, 60), generator=source)
    chosen = torch.arange(20) % 2 == i % 2
    return functional.nll_loss(model(x, edges)[chosen], torch.arange(20)[chosen] % 4)


class MaskedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.layer = nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.masked, self.write = nn.Parameter(torch.zeros(1, 1, 16)), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        order = torch.rand(x.shape[:2]).argsort(1)
        back = order.argsort(1)
        half = x.shape[1] // 2
        kept = self.layer(self.read(x).gather(1, order[:, :half, None].expand(-1, -1, 16)))
        whole = torch.cat([kept, self.masked.expand(len(x), x.shape[1] - half, -1)], 1)
        hidden = (back >= half).float()
        error = (self.write(whole.gather(1, back[..., None].expand(-1, -1, 16))) - x).square().mean(-1)
        return (error * hidden).sum() / hidden.sum()


class Quantised(nn.Module):
    """A VQ-VAE: gradients go straight through the choice of a code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(8, 6), nn.Embedding(10, 6), nn.Linear(6, 8)

    def forward(self, x: Any) -> Any:
        z = self.encoder(x)
        distance = torch.cdist(z, self.codes.weight)
        code = self.codes(distance.argmin(-1))
        soft = functional.gumbel_softmax(-distance, hard=True) @ self.codes.weight
        committed = functional.mse_loss(code, z.detach()) + 0.25 * functional.mse_loss(z, code.detach())
        return functional.mse_loss(self.decoder(z + (code - z).detach() + soft), x) + committed


class LowRank(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.drop = layer.requires_grad_(False), nn.Dropout(0.1)
        self.a, self.b = (
            nn.Parameter(torch.randn(2, layer.in_features)),
            nn.Parameter(torch.randn(layer.out_features, 2)),
        )

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.drop(x) @ self.a.T @ self.b.T


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picture, self.text = (nn.Sequential(nn.Linear(n, 16), nn.GELU(), nn.LayerNorm(16)) for n in (12, 20))
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, picture: Any, text: Any) -> Any:
        a, b = (functional.normalize(rows, dim=-1) for rows in (self.picture(picture), self.text(text)))
        return self.temperature.exp() * a @ b.T


def contrasted(model: Any, _: int) -> Any:
    found, classes = model(torch.randn(6, 12), torch.randn(6, 20)), torch.arange(6)
    return (functional.cross_entropy(found, classes) + functional.cross_entropy(found.T, classes)) / 2


def bounded(model: Any) -> None:
    with torch.no_grad():
        model.temperature.clamp_(0, math.log(100))


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.wide = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=n, dilation=n) for n in (1, 2, 3))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.ReLU())
        self.head, self.other = (
            nn.Sequential(nn.Conv2d(32, 8, 1), nn.Dropout2d(0.1), nn.Conv2d(8, 4, 1)),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: Any) -> Any:
        h = self.body(x)
        whole = functional.interpolate(self.pooled(h), size=h.shape[-2:], mode="bilinear")
        out = self.head(torch.cat([*(layer(h) for layer in self.wide), whole], 1))
        outputs = {"out": out, "other": self.other(h)}
        return {n: functional.interpolate(y, size=x.shape[-2:], mode="bilinear") for n, y in outputs.items()}


def segmented(model: Any, i: int) -> Any:
    classes = torch.randint(4, (2, 18, 18))
    classes[0, : i + 1] = 255
    found = model(torch.randn(2, 3, 18, 18))
    losses = {name: functional.cross_entropy(y, classes, ignore_index=255) for name, y in found.items()}
    return losses["out"] + 0.4 * losses["other"]


class Flow(nn.Module):
    """Affine couplings, with the logarithm of their determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()) for _ in range(4)
        )
        self.shifts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mask", torch.tensor([0.0, 1.0, 0.0, 1.0]))
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))

    def forward(self, x: Any) -> Any:
        total = 0
        for i, (scale, shift) in enumerate(zip(self.scales, self.shifts, strict=True)):
            mask = self.mask if i % 2 else 1 - self.mask
            log = scale(x * mask) * (1 - mask)
            x, total = x * mask + (1 - mask) * (x * log.exp() + shift(x * mask)), total + log.sum(-1)
        return self.prior.log_prob(x) + total


class Field(nn.Module):
    """Colours and densities along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(21, 32), nn.Linear(53, 32)])
        self.colour, self.density = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, points: Any) -> Any:
        waves = [wave(points * 2.0**k) for k in range(3) for wave in (torch.sin, torch.cos)]
        seen = torch.cat([points, *waves], -1)
        h = self.layers[1](torch.cat([seen, self.layers[0](seen).relu()], -1)).relu()
        return self.colour(h).sigmoid(), self.density(h).relu().squeeze(-1)


def rendered(model: Any, _: int) -> Any:
    origin, direction = torch.randn(2, 5, 1, 3)
    depth = torch.linspace(0, 1, 8) + torch.rand(5, 8) / 8
    colour, density = model(origin + direction * depth[..., None])
    step = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full((5, 1), 1e10)], -1)
    opaque = 1 - torch.exp(-density * step)
    passes = torch.cumprod(torch.cat([torch.ones(5, 1), 1 - opaque + 1e-10], -1), -1)[:, :-1]
    return functional.mse_loss(((opaque * passes)[..., None] * colour).sum(1), torch.rand(5, 3))


LOOPS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a denoising U-Net": (Denoiser, lambda: trained(denoised)),
    "a clipped policy": (ActorCritic, lambda: trained(clipped_policy)),
    "Q-learning": (lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), q_learning),
    "a graph convolution": (GraphConvolution, lambda: trained(nodes)),
    "a masked autoencoder": (MaskedAutoencoder, lambda: trained(lambda model, i: model(torch.randn(3, 8 + i, 8)))),
    "a quantised autoencoder": (Quantised, lambda: trained(lambda model, _: model(torch.randn(6, 8)))),
    "low-rank adapters": (
        lambda: nn.Sequential(LowRank(nn.Linear(6, 6)), nn.GELU(), LowRank(nn.Linear(6, 6))),
        lambda: trained(lambda model, _: model(torch.randn(4, 6)).square().mean()),
    ),
    "pictures and texts": (Pairs, lambda: trained(contrasted, after=bounded)),
    "segmentation": (Segments, lambda: trained(segmented)),
    "a normalising flow": (Flow, lambda: trained(lambda model, _: -model(torch.randn(16, 4)).mean())),
    "a radiance field": (Field, lambda: trained(rendered)),
}


@pytest.mark.parametrize("goal", ["order", "10 %"])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_usual_loop_is_the_same_around_a_wrapped_model(kind: str, goal: str) -> None:
    make, loop = LOOPS[kind]
    assert_same(make, lambda model: loop()(model), GOALS[goal])
