"""The training steps of bench_compile.py and bench_compile_steps.py, in three sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.pytorch import models
from tests.support.pytorch.diffusion import DiffusionUNet
from tests.support.pytorch.models import Example

SIZES = ("full", "small", "tiny")  # on the meta device; a step of about 0.2 s on a CPU; for tests, with dropout if any
_STATES = {"momentum": 1, "adam": 2}  # copies of the parameters an optimizer keeps
_Settings = dict[str, Any]


def _family(
    name: str,
    batch_size: int,
    length: int | None = None,
    *,
    small: _Settings,
    full: _Settings | None = None,
    tiny: _Settings | None = None,
) -> Callable[[str, str], Example]:
    """Return how a model of tests/support/pytorch/models.py is built, of what size and on which device.

    ``small`` and ``tiny`` have arguments of `models.build`, too, and ``dtype``.
    """

    def build(size: str, device: str) -> Example:
        if size == "full":
            return models.build(name, batch_size, length=length, device=device, settings=full)
        given = {"batch_size": 2} | (tiny or {}) if size == "tiny" else small
        arguments = {key: given[key] for key in ("batch_size", "length", "image_size") if key in given}
        settings = {key: value for key, value in given.items() if key not in arguments}
        settings = settings if size == "tiny" else (full or {}) | settings
        dtype = settings.pop("dtype", torch.float32)
        example = models.build(name, **arguments, tiny=size == "tiny", device=device, settings=settings)
        batch = {key: t.to(dtype) if t.is_floating_point() else t for key, t in example.batch.items()}
        return Example(example.model.to(dtype), batch, example.loss)

    return build


def _transformer(size: str, device: str) -> Example:
    """The encoder and decoder of Vaswani et al. 2017."""
    width, num_heads, num_layers, inner, batch_size, length = {
        "full": (512, 8, 6, 2048, 32, 128),
        "small": (128, 4, 2, 512, 16, 64),
        "tiny": (16, 4, 1, 32, 2, 8),
    }[size]
    with torch.device(device):
        model = nn.Transformer(width, num_heads, num_layers, num_layers, inner)
        batch = {name: torch.randn(length, batch_size, width) for name in ("src", "tgt")}
    return Example(model, batch, _square)


def _diffusion(size: str, device: str) -> Example:
    width, batch_size, side, others = {
        "full": (192, 8, 64, ()),
        "small": (64, 4, 32, ((1, 2), 1, 4)),
        "tiny": (32, 1, 16, ((1, 2), 1, 2)),
    }[size]
    with torch.device(device):
        model = DiffusionUNet(width, *others)  # type: ignore[arg-type]
        batch = {"latent": torch.randn(batch_size, 4, side, side), "step": torch.randn(batch_size, width)}
    return Example(model, batch, _square)


def _whisper(size: str, device: str) -> Example:
    """Speech to text: spectra in, tokens out."""
    import transformers

    width, num_layers, vocabulary, batch_size, frames, length = {
        "full": (384, 4, 51865, 8, 3000, 448),
        "small": (128, 2, 2048, 4, 600, 64),
        "tiny": (16, 1, 97, 2, 40, 8),
    }[size]
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=width // 64 or 2,
        decoder_attention_heads=width // 64 or 2,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
        max_target_positions=length,
        dropout=0.1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    )
    with torch.device(device):
        model = transformers.WhisperForConditionalGeneration(config).train()
        labels = torch.randint(3, vocabulary, (batch_size, length))
        spectra = torch.randn(batch_size, config.num_mel_bins, frames)
    return Example(model, {"input_features": spectra, "labels": labels}, models.loss)


def _square(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(**batch).square().mean()
    return result


# Small ones have about as much memory in activations for a byte of parameters as full ones.
_ENCODER = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 512}
_RESNET = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2]}
_BERT = _ENCODER | {"vocab_size": 2048, "batch_size": 16, "length": 64}
_VIT = _ENCODER | {"patch_size": 8, "image_size": 64, "batch_size": 16}
_TINY_VIT = {"batch_size": 32, "hidden_dropout_prob": 0.1}
_GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0}
_CONVNEXT = {"hidden_sizes": [24, 48, 96, 192], "depths": [2, 2, 2, 2]}
_SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4, "vocab_size": 2048}
_LLAMA = _ENCODER | {"num_key_value_heads": 2, "intermediate_size": 352, "vocab_size": 2048}

# Name -> how it is built, and with which optimizer's state beside it.
CASES: dict[str, tuple[Callable[[str, str], Example], str]] = {
    "resnet50 b32": (_family("resnet50", 32, small=_RESNET | {"batch_size": 16, "image_size": 128}), "momentum"),
    "mobilenetv2 b32": (
        _family(
            "mobilenet_v2",
            32,
            small={"depth_multiplier": 0.5, "batch_size": 16, "image_size": 96},
            # In float32 one ulp of its parameters takes its training out of every tolerance: ReLU6 gates flip.
            tiny={"batch_size": 8, "image_size": 64, "dtype": torch.float64},
        ),
        "momentum",
    ),
    "bert b32": (_family("bert_base", 32, 128, small=_BERT, tiny={"batch_size": 8, "length": 32}), "adam"),
    "vit b32": (
        _family("vit_b16", 32, small=_VIT, full={"hidden_dropout_prob": 0.0}, tiny=_TINY_VIT),
        "adam",
    ),
    "gpt2 b32, 512 tokens": (_family("gpt2", 32, 512, small=_GPT2 | {"batch_size": 8, "length": 128}), "adam"),
    "gpt2 b8, 1024 tokens": (_family("gpt2", 8, 1024, small=_GPT2 | {"batch_size": 2, "length": 512}), "adam"),
    "llama 1B b4": (
        _family("llama_1b", 4, small=_LLAMA | {"batch_size": 2, "length": 512}, tiny={"attention_dropout": 0.1}),
        "adam",
    ),
    "transformer b32": (_transformer, "momentum"),
    "unet b8": (_diffusion, "adam"),
}
# Six more that nothing was ever tuned for.
UNTUNED: dict[str, tuple[Callable[[str, str], Example], str]] = {
    "convnext b32": (_family("convnext_t", 32, small=_CONVNEXT | {"batch_size": 16, "image_size": 64}), "adam"),
    "swin b32": (_family("swin_t", 32, small=_SWIN | {"batch_size": 16, "image_size": 64}), "adam"),
    "efficientnet b32": (
        _family("efficientnet_b0", 32, small={"depth_coefficient": 0.5, "batch_size": 16, "image_size": 96}),
        "momentum",
    ),
    "t5 b16, 512 tokens": (_family("t5_small", 16, 512, small=_T5 | {"batch_size": 8, "length": 128}), "adam"),
    "whisper b8": (_whisper, "adam"),
    "deberta b16, 256 tokens": (_family("deberta_v2", 16, 256, small=_BERT), "adam"),
}
CASES_ON_GPU = CASES | UNTUNED


def build(case: str, size: str = "full", device: str | None = None) -> tuple[Example, int]:
    """Return a training step and the bytes of its optimizer's state.

    Args:
        case: one of CASES_ON_GPU.
        size: one of SIZES. The two lengths of GPT-2 are the same when tiny.
        device: where it lies; by default the meta device for full ones, the CPU for others.
    """
    make, optimizer = CASES_ON_GPU[case]
    example = make(size, device or ("meta" if size == "full" else "cpu"))
    num_bytes = sum(p.numel() * p.element_size() for p in example.model.parameters())
    return example, _STATES[optimizer] * num_bytes


def optimizer(case: str, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of a case, over all parameters of a model."""
    return models.optimizer(CASES_ON_GPU[case][1], model, fused=fused)
