"""Models of many kinds: the planned step does what the ordinary loop does, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.nn import functional

import olla
from tests.support.pytorch import networks
from tests.support.pytorch.steps import TORCH, World, agree, models, nn, slow, square, torch

pytestmark = pytest.mark.torch

SLOW = ["mobilenet_v2", "efficientnet_b0", "swin_t"]


def world_of(name: str, optimizer: str = "adamw", **settings: Any) -> World:
    torch.manual_seed(0)
    example = models.build(name, 2, tiny=True, device="cpu")
    for key, value in settings.items():
        setattr(example.model.config, key, value)
    return World(example.model, models.optimizer(optimizer, example.model), example.batch, example.loss)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Without it, gradients of looked-up weights are summed in no fixed order, by eager PyTorch too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "name",
    ["roberta_base", "t5_small", "convnext_t", "unet", *(pytest.param(n, marks=slow) for n in SLOW)],
)
def test_models_of_the_zoo_are_planned_and_equal_the_ordinary_loop(name: str) -> None:
    assert agree(world_of(name))


@pytest.mark.usefixtures("deterministic")
def test_mixture_of_experts_of_transformers_is_planned_with_batched_products() -> None:
    assert agree(world_of("mixtral_100m"))


def test_grouped_products_of_experts_are_planned_in_bfloat16() -> None:
    world = world_of("mixtral_100m")
    world.model.set_experts_implementation("grouped_mm")
    world.model.to(torch.bfloat16)
    agree(world)


def test_experts_whose_shapes_depend_on_the_data_are_refused_with_the_setting_that_helps() -> None:
    world = world_of("mixtral_100m")
    world.model.set_experts_implementation("eager")
    with pytest.raises(olla.CaptureError, match=r'set_experts_implementation\("batched_mm"\)'):
        olla.capture(world.model, world.batch, optimizer=world.optimizer, loss=world.loss)


def test_grouped_products_of_experts_in_float32_are_planned_or_refused_with_the_setting_that_helps() -> None:
    """Before torch 2.15 the CPU takes them apart by sizes that depend on the data."""
    world = world_of("mixtral_100m")
    world.model.set_experts_implementation("grouped_mm")
    if TORCH >= (2, 15):
        assert agree(world)
        return
    with pytest.raises(olla.CaptureError, match=r'set_experts_implementation\("batched_mm"\)'):
        olla.capture(world.model, world.batch, optimizer=world.optimizer, loss=world.loss)


def test_experts_that_all_see_all_tokens_are_planned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(networks.Experts(8, 4, 2), networks.Experts(8, 4, 2), nn.Linear(8, 3))
    assert agree(World(model, torch.optim.AdamW(model.parameters()), torch.randn(16, 8), square))


def test_padded_batches_are_planned() -> None:
    world = world_of("bert_base")
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 9:] = 0
    world.batch["attention_mask"] = mask
    assert agree(world)


def test_attention_written_out_with_dropout_is_planned() -> None:
    torch.manual_seed(0)
    example = models.build("gpt2", 2, tiny=True, device="cpu")
    example.model.set_attn_implementation("eager")
    assert agree(World(example.model, models.optimizer("momentum", example.model), example.batch, example.loss))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_grouped_query_attention_is_planned_and_equals_the_ordinary_loop(checkpointed: bool) -> None:
    world = world_of("llama_1b")
    if checkpointed:  # transformers has no cache then, and looks whether positions are those of packed sequences
        world.model.activation_checkpointing_enable()
    assert agree(world)


@pytest.mark.parametrize("name", ["gpt2", "bert_base"])
def test_activation_checkpointing_of_transformers_draws_the_same_dropout_again(name: str) -> None:
    world = world_of(name)
    world.model.activation_checkpointing_enable()
    assert agree(world)


class Decided(nn.Linear):
    """Decides by values that depend on nothing, or seem so."""

    def __init__(self, decide: Callable[[Any], bool]) -> None:
        torch.manual_seed(0)
        super().__init__(6, 6)
        self.decide = decide

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y.exp() if self.decide(x) else y.tanh()


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: bool((torch.arange(6).diff() == 1).all()),
        lambda x: torch.ones(3).sum().item() > 3,
        lambda x: int(torch.linspace(0, 5, 6).to(torch.int64)[-1]) == 5,
    ],
)
def test_a_branch_on_values_that_depend_on_nothing_is_that_of_the_ordinary_loop(decide: Callable[[Any], bool]) -> None:
    model = Decided(decide)
    assert agree(World(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 6), square))


def changed(x: Any) -> bool:
    total = torch.zeros(3)
    total[1:].add_(x.sum())
    return bool(total.sum() > 0)


@pytest.mark.parametrize("decide", [changed, lambda x: bool(torch.rand(3).sum() > 1), lambda x: bool(x.sum() > 0)])
def test_a_branch_on_values_of_the_batch_or_of_random_numbers_is_refused(decide: Callable[[Any], bool]) -> None:
    with pytest.raises(olla.CaptureError, match="needs the values of tensors"):
        olla.capture(Decided(decide), torch.ones(4, 6), loss=square)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(4, 8, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_planned(kind: str) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind)
    world = World(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(2, 5, 4), square)
    agree(world)  # eager runs oneDNN's kernels


class Attention(nn.Module):
    """Layers of torch's own, with a padding mask, in a model that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any, padding: Any) -> Any:
        hidden = self.encoder(x, src_key_padding_mask=padding)
        return self.head(hidden.mean(1)), hidden


def test_transformer_layers_of_torch_with_targets_and_metrics_are_planned() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        logits, hidden = model(batch["x"], batch["padding"])
        value = functional.cross_entropy(logits, batch["y"], label_smoothing=0.1)
        return value, {"right": (logits.argmax(-1) == batch["y"]).float().mean(), "norm": hidden.norm()}

    torch.manual_seed(0)
    model = Attention()
    batch = {"x": torch.randn(4, 5, 8), "padding": torch.zeros(4, 5, dtype=torch.bool), "y": torch.arange(4) % 3}
    batch["padding"][1, 3:] = True
    assert agree(World(model, torch.optim.AdamW(model.parameters()), batch, loss))
