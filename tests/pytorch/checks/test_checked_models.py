"""Models that validate what they compute: the planned step equals the ordinary one to the bit, dropout on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from torch import distributions as D
from torch.nn import functional as F

import olla
from tests.support.pytorch.steps import World, nn, same, torch

pytestmark = pytest.mark.torch
STEPS = 5


def agree(world: World, **goal: Any) -> bool:
    """Whether five planned steps are the five ordinary ones: losses, parameters, buffers and optimizer state."""
    eager = world.copy()
    step = world.compiled(**goal)
    results = world.planned(step, STEPS)
    assert len(results) == STEPS
    return same(results, eager.eager(STEPS)) and same(world.values(), eager.values())


def of_transformers(model: Any, batch: Any) -> World:
    model.train()
    return World(model, torch.optim.AdamW(model.parameters(), lr=0.01), batch, lambda model, batch: model(**batch).loss)


def tokens() -> Any:
    return torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))


def deberta(**head: Any) -> World:
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        **head,
    )
    mask = torch.ones_like(tokens())
    mask[1, 9:] = 0
    if head:
        labels = torch.tensor([0, 2])
        model = transformers.DebertaV2ForSequenceClassification(config)
    else:
        labels, model = tokens(), transformers.DebertaV2ForMaskedLM(config)
    return of_transformers(model, {"input_ids": tokens(), "attention_mask": mask, "labels": labels})


def deberta_classifier() -> World:
    return deberta(num_labels=3, problem_type="single_label_classification")


def wav2vec2(**settings: Any) -> World:
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        **{"layerdrop": 0.0, "apply_spec_augment": False, **settings},
    )
    sound = torch.randn(2, 400)
    heard = torch.ones(2, 400, dtype=torch.long)
    heard[1, 300:] = 0
    labels = torch.randint(1, 20, (2, 5))
    labels[0, 4] = -100
    return of_transformers(
        transformers.Wav2Vec2ForCTC(config), {"input_values": sound, "attention_mask": heard, "labels": labels}
    )


def with_ctc(model: Any, batch: Any) -> Any:
    """The CTC loss of the model, from its logits and padded labels."""
    logits = model(batch["input_values"], attention_mask=batch["attention_mask"]).logits
    lengths = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1)).to(torch.long)
    labels = batch["labels"]
    if labels.max() >= model.config.vocab_size:
        raise ValueError("labels beyond the vocabulary")
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    return F.ctc_loss(log_probs, labels, lengths, (labels >= 0).sum(-1), reduction="sum", zero_infinity=True)


def wav2vec2_with_ctc() -> World:
    world = wav2vec2()
    world.loss = with_ctc
    return world


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8)
        )
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 12))

    def forward(self, x: Any) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        posterior = D.Normal(mean, torch.exp(0.5 * log_variance))
        prior = D.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        likelihood = D.Independent(D.Bernoulli(logits=self.decoder(posterior.rsample())), 1)
        return (D.kl_divergence(posterior, prior).sum(-1) - likelihood.log_prob(x)).mean()


def vae() -> World:
    torch.manual_seed(0)
    model = Vae()
    batch = (torch.rand(6, 12) > 0.5).float()
    return World(model, torch.optim.Adam(model.parameters(), lr=0.01), batch, lambda model, x: model(x))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1))
        self.policy, self.mean, self.value = nn.Linear(16, 4), nn.Linear(16, 2), nn.Linear(16, 1)
        self.log_scale = nn.Parameter(torch.zeros(2))


def ppo_step(agent: Any, optimizer: Any, batch: Any) -> Any:
    hidden = agent.body(batch["observed"])
    discrete = D.Categorical(logits=agent.policy(hidden))
    squashed = D.TransformedDistribution(
        D.Independent(D.Normal(agent.mean(hidden), agent.log_scale.exp()), 1), [D.TanhTransform()]
    )
    log_prob = discrete.log_prob(batch["choice"]) + squashed.log_prob(batch["move"])
    ratio = (log_prob - batch["log_prob"]).exp()
    gain = torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"]).mean()
    error = (agent.value(hidden).squeeze(-1) - batch["returned"]).square().mean()
    loss = 0.5 * error - gain - 0.01 * discrete.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5, error_if_nonfinite=True)
    optimizer.step()
    return loss


def ppo() -> World:
    torch.manual_seed(0)
    agent = Agent()
    batch = {
        "observed": torch.randn(8, 5),
        "choice": torch.randint(0, 4, (8,)),
        "move": torch.rand(8, 2) - 0.5,
        "log_prob": -torch.rand(8),
        "advantage": torch.randn(8),
        "returned": torch.randn(8),
    }
    return World(agent, torch.optim.Adam(agent.parameters(), lr=0.01), batch, None, ppo_step)


@pytest.mark.parametrize("goal", [{}, {"minimise": "peak"}])
@pytest.mark.parametrize("make", [deberta, deberta_classifier, wav2vec2_with_ctc, vae, ppo])
def test_models_that_validate_are_taken_to_the_bit(make: Callable[[], World], goal: Any) -> None:
    assert agree(make(), **goal)


def test_layers_that_are_never_dropped_are_taken() -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
    )
    batch = {"input_ids": tokens(), "labels": tokens()}
    assert agree(of_transformers(transformers.BartForConditionalGeneration(config), batch))


def positive(x: Any) -> Any:
    return F.softplus(x) + 0.1


def covariance(x: Any) -> Any:
    return x.mT @ x + torch.eye(3)


DISTRIBUTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda y, x: D.Normal(y, positive(y)).log_prob(x),
    "laplace": lambda y, x: D.Laplace(y, positive(y)).rsample(),
    "log_normal": lambda y, x: D.LogNormal(y, positive(y)).log_prob(x.abs() + 0.1),
    "categorical": lambda y, x: D.Categorical(probs=positive(y)).log_prob(x.argmax(-1)),
    "categorical_draws": lambda y, x: D.Categorical(logits=y).log_prob(D.Categorical(logits=y).sample()),
    "bernoulli": lambda y, x: D.Bernoulli(probs=y.sigmoid()).log_prob((x > 0).float()),
    "beta": lambda y, x: D.Beta(positive(y), positive(-y)).log_prob(x.sigmoid()),
    "beta_draws": lambda y, x: D.Beta(positive(y), positive(-y)).rsample(),
    "gamma": lambda y, x: D.Gamma(positive(y), positive(-y)).rsample(),
    "dirichlet": lambda y, x: D.Dirichlet(positive(y)).log_prob(x.softmax(-1)),
    "poisson": lambda y, x: D.Poisson(positive(y)).log_prob(x.abs().round()),
    "one_hot": lambda y, x: D.OneHotCategorical(logits=y).log_prob(F.one_hot(x.argmax(-1), 3).float()),
    "multivariate": lambda y, x: D.MultivariateNormal(y, covariance_matrix=covariance(y)).log_prob(x),
    "multivariate_draws": lambda y, x: D.MultivariateNormal(y, precision_matrix=covariance(y)).rsample(),
    "low_rank": lambda y, x: D.LowRankMultivariateNormal(y, y[..., None], positive(y)).log_prob(x),
    "independent": lambda y, x: D.Independent(D.Normal(y, positive(y)), 1).log_prob(x),
    "transformed": lambda y, x: D.TransformedDistribution(
        D.Normal(y, positive(y)), [D.TanhTransform(), D.AffineTransform(1.0, 2.0)]
    ).rsample(),
    "mixture": lambda y, x: D.MixtureSameFamily(D.Categorical(logits=y), D.Normal(y, positive(y))).log_prob(x[:, 0]),
    "kl_normal": lambda y, x: D.kl_divergence(D.Normal(y, positive(y)), D.Normal(x, positive(x))),
    "kl_beta": lambda y, x: D.kl_divergence(D.Beta(positive(y), positive(-y)), D.Beta(positive(x), positive(x))),
    "kl_multivariate": lambda y, x: D.kl_divergence(
        D.MultivariateNormal(y, covariance_matrix=covariance(y)), D.MultivariateNormal(x, torch.eye(3))
    ),
    "gaussian_nll": lambda y, x: F.gaussian_nll_loss(y, x, positive(y)),
    "one_hot_classes": lambda y, x: F.one_hot(x.argmax(-1), 3) * y,
    "ctc": lambda y, x: F.ctc_loss(y[:, None].log_softmax(-1), torch.tensor([[1, 2]]), (6,), (2,)),
    "ctc_unbatched": lambda y, x: F.ctc_loss(
        y.log_softmax(-1), torch.tensor([1, 2]), torch.tensor([6]), torch.tensor([2]), reduction="none"
    ),
    "linalg": lambda y, x: torch.linalg.solve(covariance(y), x.mT) + torch.linalg.inv(covariance(y)).sum(),
}


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_distributions_and_losses_are_taken_with_their_validation(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
    x = torch.randn(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    world = World(model, optimizer, x, lambda model, x: DISTRIBUTIONS[name](model(x), x).mean())
    assert agree(world, minimise="peak")


def test_pairs_of_boxes_are_checked() -> None:
    def overlap(first: Any, second: Any) -> Any:
        if not (first[:, 2:] >= first[:, :2]).all():
            raise ValueError(f"boxes1 must be in [x0, y0, x1, y1] (corner) format, but got {first}")
        area = (torch.min(first[:, None, 2:], second[:, 2:]) - torch.max(first[:, None, :2], second[:, :2])).clamp(
            min=0
        )
        return area[..., 0] * area[..., 1]

    def loss(model: Any, boxes: Any) -> Any:
        return overlap(model(boxes[:, :2]).sigmoid() + boxes * 0, boxes).sum()

    class Boxes(nn.Linear):
        def forward(self, x: Any) -> Any:
            corner = super().forward(x)
            return torch.cat([corner, corner + 1], 1)

    torch.manual_seed(0)
    model = Boxes(2, 2)
    boxes = torch.rand(5, 4)
    boxes[:, 2:] += boxes[:, :2]
    world = World(model, torch.optim.SGD(model.parameters(), lr=0.01), boxes, loss)
    step = world.compiled()
    step(boxes)
    with pytest.raises(ValueError, match=r"boxes1 must be .* but got <a tensor of shape \(5, 4\)>"):
        step(boxes * float("nan"))


def linear_sum_assignment(cost: Any) -> Any:
    return cost.numpy().argmin()


def match(model: Any, x: Any) -> Any:
    chosen = linear_sum_assignment(model(x).detach())
    return model(x)[chosen].sum()


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (lambda: wav2vec2(layerdrop=0.5), r"skip_the_layer.*aten.lt.Scalar decides.*config.layerdrop = 0.0"),
        (lambda: wav2vec2(apply_spec_augment=True), r"numpy.*config.apply_spec_augment = False"),
        (wav2vec2, r"loss_ctc.py:\d+, .*masked_select.*takes padded labels"),
        (lambda: deberta(num_labels=3), r"nonzero\(\).*problem_type = .single_label_classification"),
        (
            lambda: World(nn.Linear(3, 3), None, torch.ones(3, 3), match),
            r"needs the values of tensors.*argmin\(\).*Match before the step",
        ),
    ],
)
def test_what_values_decide_is_refused_with_what_lets_the_model_through(world: Any, message: str) -> None:
    refused = world()
    with pytest.raises(olla.CaptureError, match=message):
        olla.capture(refused.model, refused.batch, loss=refused.loss)
