"""The training steps of bench_compile.py: full size for replay, small for real runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import models
from diffusion import DiffusionUNet
from models import Example

_STATES = {"momentum": 1, "adam": 2}  # copies of the parameters an optimizer keeps


def _family(name: str, batch_size: int, length: int | None = None, **settings: Any) -> Callable[[bool], Example]:
    def build(tiny: bool) -> Example:
        size, device = (2, "cpu") if tiny else (batch_size, "meta")
        return models.build(name, size, tiny=tiny, length=None if tiny else length, device=device, settings=settings)

    return build


def _transformer(tiny: bool) -> Example:
    """The encoder and decoder of Vaswani et al. 2017, 128 tokens of either language."""
    width, batch_size, length = (16, 2, 8) if tiny else (512, 32, 128)
    with torch.device("cpu" if tiny else "meta"):
        model = nn.Transformer(width, 4 if tiny else 8, *((1, 1, 32) if tiny else (6, 6, 2048)))
        batch = {name: torch.randn(length, batch_size, width) for name in ("src", "tgt")}
    return Example(model, batch, _square)


def _diffusion(tiny: bool) -> Example:
    width, batch_size, side = (32, 1, 16) if tiny else (192, 8, 64)
    with torch.device("cpu" if tiny else "meta"):
        model = DiffusionUNet(width, *(((1, 2), 1, 2) if tiny else ()))
        batch = {"latent": torch.randn(batch_size, 4, side, side), "step": torch.randn(batch_size, width)}
    return Example(model, batch, _square)


def _square(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(**batch).square().mean()
    return result


# Name -> how it is built, and with which optimizer's state beside it.
CASES: dict[str, tuple[Callable[[bool], Example], str]] = {
    "resnet50 b32": (_family("resnet50", 32), "momentum"),
    "mobilenetv2 b32": (_family("mobilenet_v2", 32), "momentum"),
    "bert b32": (_family("bert_base", 32, 128), "adam"),
    "vit b32": (_family("vit_b16", 32, hidden_dropout_prob=0.0), "adam"),
    "gpt2 b32, 512 tokens": (_family("gpt2", 32, 512), "adam"),
    "gpt2 b8, 1024 tokens": (_family("gpt2", 8, 1024), "adam"),
    "llama 1B b4": (_family("llama_1b", 4), "adam"),
    "transformer b32": (_transformer, "momentum"),
    "unet b8": (_diffusion, "adam"),
}


def build(case: str, *, tiny: bool = False) -> tuple[Example, int]:
    """Return a training step and the bytes of its optimizer's state."""
    make, optimizer = CASES[case]
    example = make(tiny)
    num_bytes = sum(p.numel() * p.element_size() for p in example.model.parameters())
    return example, _STATES[optimizer] * num_bytes
