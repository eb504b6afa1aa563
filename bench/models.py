"""Models to plan: transformers configurations with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Example:
    """A model, a batch for it, and its loss."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class _Family:
    """How to make a model of one kind: its transformers classes, its full size, and a tiny size for tests."""

    config: str
    model: str
    full: dict[str, Any]
    tiny: dict[str, Any]
    length: tuple[int, int] = (0, 0)  # tokens per sequence, full and tiny; 0: images


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
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 97,
        },
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
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 97,
        },
        (1024, 16),
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
}
NAMES = tuple(_FAMILIES)


def build(
    name: str, batch_size: int = 1, *, tiny: bool = False, length: int | None = None, device: str = "meta"
) -> Example:
    """Make a model in training mode with a batch and its loss.

    Args:
        name: one of NAMES.
        batch_size: sequences or images in the batch.
        tiny: a model of a few thousand parameters, for tests.
        length: tokens per sequence, where the model takes tokens.
        device: "meta" for planning only, "cpu" for random weights and data.
    """
    import transformers

    family = _FAMILIES[name]
    settings = family.full | (family.tiny if tiny else {})
    size = 32 if tiny else 224
    if not any(family.length):
        settings["image_size"] = size
    config = getattr(transformers, family.config)(**settings)
    with torch.device(device):
        model = getattr(transformers, family.model)(config).train()
        if any(family.length):
            tokens = torch.randint(0, config.vocab_size, (batch_size, length or family.length[tiny]))
            batch = {"input_ids": tokens, "labels": tokens.clone()}
        else:
            labels = torch.randint(0, config.num_labels, (batch_size,))
            batch = {"pixel_values": torch.randn(batch_size, 3, size, size), "labels": labels}
    return Example(model, batch, loss)


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss a transformers model computes from the labels in its batch."""
    result: torch.Tensor = model(**batch).loss
    return result


def optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer over all parameters: "sgd", "momentum", "adam" or "adamw"."""
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if name == "momentum" else 0.0)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](model.parameters(), lr=1e-3)
