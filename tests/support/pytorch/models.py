"""Models to plan: transformers configurations and networks of our own, with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.pytorch import networks


@dataclass(frozen=True)
class Example:
    """A model, a batch for it, and its loss."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class _Family:
    """How to make a model of one kind: its transformers classes, its full size, and a tiny size for tests."""

    config: str  # empty: a network of our own, made with the settings
    model: str
    full: dict[str, Any]
    tiny: dict[str, Any]
    length: tuple[int, int] = (0, 0)  # tokens per sequence, full and tiny; 0: images
    image_size: tuple[int, int] = (224, 32)  # of a side


_TINY_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
}
_TINY_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
_FAMILIES = {
    "gpt2": _Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {},
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "vocab_size": 97,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        (1024, 16),
    ),
    "gpt2_xl": _Family(
        "GPT2Config", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, {"n_layer": 2}, (1024, 16)
    ),
    "bert_base": _Family(
        "BertConfig",
        "BertForMaskedLM",
        {},
        _TINY_ENCODER,
        (512, 16),
    ),
    "llama_1b": _Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
        _TINY_DECODER,
        (1024, 16),
    ),
    "llama_100m": _Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "vocab_size": 16384,
        },
        _TINY_DECODER,
        (512, 16),
    ),
    "mixtral_100m": _Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 16384,
            "experts_implementation": "batched_mm",  # the only one whose shapes do not depend on where tokens go
        },
        _TINY_DECODER | {"num_local_experts": 4},
        (128, 16),
    ),
    "roberta_base": _Family(
        "RobertaConfig",
        "RobertaForMaskedLM",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        _TINY_ENCODER,
        (512, 16),
    ),
    "t5_small": _Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {"decoder_start_token_id": 0},
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 97},
        (512, 16),
    ),
    "deberta_v2": _Family(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        _TINY_ENCODER,
        (256, 16),
    ),
    "resnet18": _Family(
        "ResNetConfig",
        "ResNetForImageClassification",
        {
            "num_labels": 1000,
            "layer_type": "basic",
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
        },
        {"num_labels": 10, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
    ),
    "resnet50": _Family(
        "ResNetConfig",
        "ResNetForImageClassification",
        {"num_labels": 1000},
        {"num_labels": 10, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
    ),
    "vit_b16": _Family(
        "ViTConfig",
        "ViTForImageClassification",
        {"num_labels": 1000, "hidden_dropout_prob": 0.1},
        {
            "num_labels": 10,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    ),
    "swin_t": _Family(
        "SwinConfig",
        "SwinForImageClassification",
        {"num_labels": 1000, "hidden_dropout_prob": 0.1},
        {"num_labels": 10, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "convnext_t": _Family(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"num_labels": 1000, "drop_path_rate": 0.1},
        {"num_labels": 10, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "mobilenet_v2": _Family(
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        {"num_labels": 1000},
        {"num_labels": 10, "depth_multiplier": 0.25},
    ),
    "efficientnet_b0": _Family(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        {"num_labels": 1000, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
        {"num_labels": 10, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    ),
    "vgg16": _Family(
        "",
        "VGG",
        {
            "num_labels": 1000,
            "depths": (2, 2, 3, 3, 3),
            "widths": (64, 128, 256, 512, 512),
            "image_size": 224,
            "hidden_size": 4096,
        },
        {"num_labels": 10, "depths": (1, 2), "widths": (4, 8), "image_size": 32, "hidden_size": 16},
    ),
    "unet": _Family(
        "",
        "UNet",
        {"num_labels": 21, "widths": (64, 128, 256, 512)},
        {"num_labels": 5, "widths": (4, 8, 16)},
        image_size=(256, 32),
    ),
}
NAMES = tuple(_FAMILIES)


def build(
    name: str,
    batch_size: int = 1,
    *,
    tiny: bool = False,
    length: int | None = None,
    image_size: int | None = None,
    device: str = "meta",
    settings: dict[str, Any] | None = None,
) -> Example:
    """Make a model in training mode with a batch and its loss.

    Args:
        name: one of NAMES.
        batch_size: sequences or images in the batch.
        tiny: a model of a few thousand parameters, for tests.
        length: tokens per sequence, where the model takes tokens.
        image_size: pixels of a side, where it takes images.
        device: "meta" for planning only, "cpu" for random weights and data.
        settings: of the model's configuration, in place of ours.
    """
    family = _FAMILIES[name]
    settings = family.full | (family.tiny if tiny else {}) | (settings or {})
    size = image_size or family.image_size[tiny]
    if not any(family.length) and family.config:
        settings["image_size"] = size
    with torch.device(device):
        model = _model(family, settings).train()
        if any(family.length):
            tokens = torch.randint(3, model.config.vocab_size, (batch_size, length or family.length[tiny]))
            batch = {"input_ids": tokens, "labels": tokens.clone()}
        else:
            pixels = torch.randn(batch_size, 3, size, size)
            shape = (batch_size, size, size) if family.model == "UNet" else (batch_size,)  # it labels every pixel
            batch = {"pixel_values": pixels, "labels": torch.randint(settings["num_labels"], shape)}
    return Example(model, batch, loss)


def _model(family: _Family, settings: dict[str, Any]) -> Any:
    if not family.config:
        return getattr(networks, family.model)(**settings)
    import transformers

    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**settings))
    if getattr(model, "loss_type", "") is None:  # its default, said plainly: the warning otherwise breaks graphs
        model.loss_type = "ForCausalLM"
    return model


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss a transformers model computes from the labels in its batch."""
    result: torch.Tensor = model(**batch).loss
    return result


def optimizer(name: str, model: torch.nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """Make an optimizer over all parameters: sgd, momentum, adam, adamw or adafactor; in one kernel if fused."""
    given = {"fused": True} if fused else {}
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if name == "momentum" else 0.0, **given)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
    found: torch.optim.Optimizer = kinds[name](model.parameters(), lr=1e-3, **given)
    return found


def device_bytes(values: Iterable[Any]) -> int:
    """Return what torch's allocator counts for tensors of the device: blocks of 512 bytes."""
    storages = [value.untyped_storage() for value in values if torch.is_tensor(value) and value.is_cuda]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(-(-size // 512) * 512 for size in sizes.values())
