"""Networks of Hugging Face transformers, tiny and built from their configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import benchmarks.networks.gpt2  # noqa: F401  # lets the library's warnings be left out of what is captured

VOCABULARY = 101
LENGTH = 8
BATCH = 4
_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = _TEXT | {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 2 * LENGTH,
}
_SEEING: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_PROBLEM = "single_label_classification"  # else the first call finds it out, writes it down, and is captured again

Batch = dict[str, Tensor]
Build = Callable[[], tuple[torch.nn.Module, Batch]]


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _padded() -> Batch:
    """Tokens and a mask: each sequence ends a little earlier than the one before."""
    mask = (torch.arange(LENGTH) < LENGTH - torch.arange(BATCH)[:, None]).long()
    return {"input_ids": _tokens() * mask, "attention_mask": mask}


def _decoder(name: str, **config: Any) -> Build:
    """A causal language model: its labels are its own tokens."""

    def build() -> tuple[torch.nn.Module, Batch]:
        module = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")
        model = module(getattr(transformers, f"{name}Config")(**_TEXT, **config))
        tokens = _tokens()
        return model, {"input_ids": tokens, "labels": tokens.clone()}

    return build


def _encoder(name: str, task: str, **config: Any) -> Build:
    def build() -> tuple[torch.nn.Module, Batch]:
        config_class, model_class = (getattr(transformers, f"{name}{part}") for part in ("Config", f"For{task}"))
        model = model_class(config_class(**config, problem_type=_PROBLEM))
        labels = torch.randint(2, (BATCH,)) if task == "SequenceClassification" else _tokens()
        return model, {**_padded(), "labels": labels}

    return build


def _translator(name: str, **config: Any) -> Build:
    def build() -> tuple[torch.nn.Module, Batch]:
        model = getattr(transformers, f"{name}ForConditionalGeneration")(
            getattr(transformers, f"{name}Config")(**_TEXT, decoder_start_token_id=1, **config)
        )
        return model, {**_padded(), "labels": _tokens(LENGTH // 2)}

    return build


def _vit() -> tuple[torch.nn.Module, Batch]:
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SEEING, num_labels=10, problem_type=_PROBLEM)
    )
    return model, {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(10, (BATCH,))}


class _LearningCLIP(transformers.CLIPModel):
    def forward(self, **batch: Tensor) -> Any:
        return super().forward(**batch, return_loss=True)


def _clip() -> tuple[torch.nn.Module, Batch]:
    config = transformers.CLIPConfig(text_config=_ENCODER, vision_config=_SEEING, projection_dim=16)
    batch = {**_padded(), "pixel_values": torch.randn(BATCH, 3, 16, 16)}
    batch["input_ids"][:, LENGTH // 2] = 2  # each text ends somewhere
    return _LearningCLIP(config), batch


def _whisper() -> tuple[torch.nn.Module, Batch]:
    config = transformers.WhisperConfig(
        **_TEXT,
        decoder_start_token_id=1,
        **_BART,
        num_mel_bins=8,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(BATCH, 8, 2 * LENGTH), "labels": _tokens(LENGTH // 2)}


_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 2 * LENGTH,
}

BUILDS: dict[str, Build] = {
    "GPT-2": _decoder("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=2 * LENGTH),
    "Llama": _decoder("Llama", **_LLAMA),
    "Mistral": _decoder("Mistral", **_LLAMA, sliding_window=LENGTH // 2),
    "Qwen2": _decoder("Qwen2", **_LLAMA),
    "Mamba": _decoder("Mamba", hidden_size=16, state_size=4, num_hidden_layers=1),
    "BERT": _encoder("Bert", "MaskedLM", **_ENCODER),
    "RoBERTa": _encoder("Roberta", "MaskedLM", **_ENCODER | {"max_position_embeddings": 2 * LENGTH + 2}),
    "DistilBERT": _encoder(
        "DistilBert",
        "SequenceClassification",
        **_TEXT,
        dim=32,
        n_layers=1,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=2 * LENGTH,
    ),
    "T5": _translator("T5", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    "BART": _translator(
        "Bart",
        **_BART,
        max_position_embeddings=2 * LENGTH,
    ),
    "ViT (transformers)": _vit,
    "CLIP": _clip,
    "Whisper": _whisper,
}
