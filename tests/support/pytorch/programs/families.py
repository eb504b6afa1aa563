"""Small models of transformers, a family each, as people train them: what attends, and with which masks, is theirs."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 256
_CLASSES = {
    "CausalLM": "llama mistral gemma3_text gpt2 qwen2 qwen3 phi opt gpt_neox mixtral bloom",
    "MaskedLM": "bert roberta deberta-v2 electra distilbert",
    "Seq2SeqLM": "t5 bart",
    "ImageClassification": "vit deit",
    "SpeechSeq2Seq": "whisper",
}
CLASS = {name: kind for kind, names in _CLASSES.items() for name in names.split()}


def family(
    name: str, *, checkpointed: bool, width: int = 32, layers: int = 2, batch: int = 2, length: int = 16
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a model in training mode, and its batch.

    Args:
        name: of `CLASS`.
        checkpointed: whether its blocks are recomputed in backward, as ``gradient_checkpointing_enable()`` has it.
        width, layers, batch, length: sizes; of an image, the number of patches is about the length.
    """
    torch.manual_seed(0)
    side = 4 * int(length**0.5)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 4 * width, "ffn_dim": 4 * width, "vocab_size": VOCABULARY, "type_vocab_size": 1}
    sizes |= {"max_position_embeddings": length + 2, "head_dim": width // 4, "sliding_window": length // 2}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    if name in ("whisper", "t5", "bart"):
        sizes |= {"encoder_layers": layers, "decoder_layers": layers, "num_layers": layers, "num_heads": 4}
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_kv": width // 4, "d_ff": 4 * width}
        sizes |= {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, "num_mel_bins": 16}
        sizes |= {"max_source_positions": length, "max_target_positions": length}
    if name == "opt":
        sizes["word_embed_proj_dim"] = width
    if CLASS[name] == "ImageClassification":
        sizes = {key: sizes[key] for key in list(sizes)[:5]} | {"image_size": side, "patch_size": 4, "num_labels": 10}
    if name == "distilbert":
        sizes |= {"dim": width, "n_layers": layers, "n_heads": 4, "hidden_dim": 4 * width}
    config = transformers.AutoConfig.for_model(name, **sizes)
    config.use_cache = False
    config.architectures = config.architectures or []  # transformers 5.24 goes through them for some models
    model = getattr(transformers, f"AutoModelFor{CLASS[name]}").from_config(config)
    model.train()
    if CLASS[name] == "CausalLM":
        model.loss_type = "ForCausalLM"  # else GPT-2 logs what it takes, which breaks the graph
    if checkpointed:
        # Since 5.23 the one, which the other is an old name of.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model, _batch(CLASS[name], batch, length, side)


def _batch(kind: str, batch: int, length: int, side: int) -> dict[str, torch.Tensor]:
    if kind == "ImageClassification":
        return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(10, (batch,))}
    ids = torch.randint(3, VOCABULARY, (batch, length))
    if kind == "SpeechSeq2Seq":
        return {"input_features": torch.randn(batch, 16, 2 * length), "labels": ids}
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a model's own loss."""
    found: torch.Tensor = model(**data).loss
    return found
