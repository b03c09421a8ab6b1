"""Every language model that transformers lists, from the smallest configuration that it trains with.

A configuration is made small field by field: what counts layers, heads, experts or positions, and what says how wide a
part is, is known by its name. Where layers are of several kinds, one of each is kept. What no rule makes small enough,
or too small for the model's own arithmetic, stands in `PARTICULAR`. Nothing is downloaded: weights are random.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

Made = tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
VOCABULARY, LENGTH, BATCH, HEADS = 96, 16, 8, 4
LARGEST = 3_000_000  # parameters; a model with more was not made small

# what a field is called, and the most it may be; the first that fits counts
RULES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|pretraining_tp|.*_cycles", 2),
    (r".*vocab_size.*|entity_vocab_size|.*_vocab", VOCABULARY),
    (r"(num_)?(.*_)?(position_embeddings|source_positions|target_positions)|n_positions|n_ctx|max_seq_len", 64),
    (r"context_length|.*sliding_window(_size)?|(local_)?attention_window(_size|_len)?|local_attention", 4),
    (r"num_key_value_heads|.*kv_heads|kv_n_heads|num_query_groups|.*num_key_heads", 2),
    (r"topk_group", 1),
    (r".*experts_per_tok|.*top_?k(_experts)?|moe_k|n_group", 2),
    (r"(num_|n_)shared_experts|moe_num_shared_experts", 1),
    (r".*expert.*(size|dim)", 32),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"(num_|n_)?(.*_)?heads?|.*_n_heads|attention_heads|num_heads_ipa", HEADS),
    (r".*(head_dim|head_size|head_width)|d_kv|d_head|dim_head|kv_channels|.*lora_rank|rotary_dim|dim_model_base", 16),
    (r".*(layers|blocks|n_layer|num_layer|depth)", 2),
    (r".*(ffn|_ff|intermediate|ffn_hidden|inner|dff|hidden_dim).*", 64),
    (r".*(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|embedding_dim|emb_size|feature_size).*", 64),
    (r"dim|.*(_dim|_dims|_width|_channels?|_rank)", 64),
    (r".*chunk_size|(local|lsh)_attn_chunk_length|.*block_size", 4),
    (r".*d_state|state_size|ssm_state_size", 8),
    (r"(mamba_)?n_?groups", 2),
    (r"image_size|crop_size", 32),
)
SPECIAL_TOKEN = re.compile(r".*(token_id|token_index|_index|lang_id|_id)$")


def models() -> dict[str, tuple[str, ...]]:
    """Every class of model that is listed, and for which tasks."""
    tasks: dict[str, tuple[str, ...]] = {}
    for task, mapping in TASKS.items():
        for name in dict.fromkeys(getattr(modeling_auto, mapping).values()):
            tasks[name] = (*tasks.get(name, ()), task)
    return tasks


def make(name: str, seed: int = 0) -> Made:
    """A model in training mode, its step, and a batch for it."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, name)
    model = model_class(configuration(model_class))
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > LARGEST:
        raise ValueError(f"{name} has {parameters:,} parameters: no rule of benchmarks/census/text.py makes it small.")
    model.train()

    def step(**batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    return model, step, batch_for(model)


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    """Tokens, and labels for them; with images, or in several books of codes, where a model takes such."""
    config: Any = model.config
    books = getattr(config, "num_codebooks", 1) if type(model).__name__.startswith("Musicgen") else 1
    batch = {
        "input_ids": torch.randint(10, 40, (BATCH * books, LENGTH)),
        "labels": torch.randint(10, 40, (BATCH, LENGTH) if books == 1 else (BATCH, LENGTH, books)),
    }
    if type(model).__name__.startswith("Git"):
        batch["pixel_values"] = torch.randn(BATCH, 3, config.vision_config.image_size, config.vision_config.image_size)
    return batch


def configuration(model_class: Any) -> PretrainedConfig:
    """The smallest configuration that the rules make of a model's own."""
    return small(model_class.config_class(), **PARTICULAR.get(model_class.__name__, {}))


def small(default: PretrainedConfig, **options: Any) -> PretrainedConfig:
    """A configuration with what `PARTICULAR` says of its kind, and the rules of what it does not."""
    kind = type(default)
    said = PARTICULAR.get(kind.__name__, {})
    found = {**_different(default), **dict(_shrunk(default)), **_one_of_each(default)}
    for part in getattr(kind, "sub_configs", None) or {}:
        if isinstance(vars(default).get(part), PretrainedConfig):
            found[part] = small(vars(default)[part])
    return kind(**{**found, **said, **options})


def _own(config: PretrainedConfig) -> dict[str, Any]:
    """Its values by all their names. Asked for one by one it refuses those that differ from layer to layer."""
    values = vars(config)
    return values | {name: values[kept] for name, kept in config.attribute_map.items() if kept in values}


def _different(default: PretrainedConfig) -> dict[str, Any]:
    """Values of a part of a larger model that are other ones in a part by itself."""
    alone, own = _own(type(default)()), _own(default)
    plain = (bool, int, float, str)
    return {
        field.name: _smaller(field.name, own[field.name])
        for field in dataclasses.fields(default)
        if isinstance(own.get(field.name), plain) and own[field.name] != alone.get(field.name)
    }


def _shrunk(default: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    specials, own = iter(range(3, 10)), _own(default)
    for field in dataclasses.fields(default):
        value = own.get(field.name)
        if SPECIAL_TOKEN.fullmatch(field.name):
            if isinstance(value, int) and value >= VOCABULARY:
                yield field.name, next(specials, 9)
            continue
        if isinstance(value, bool) or not isinstance(value, int) or field.default is None:
            continue  # no number, or one that is made from others
        if field.name == "num_key_value_heads" and value == own.get("num_attention_heads"):
            yield field.name, HEADS
        elif value > (most := _most(field.name, value)):
            yield field.name, most


def _most(name: str, value: int) -> int:
    """The most that a field may be; the value itself where no rule knows its name."""
    return next((most for pattern, most in RULES if re.fullmatch(pattern, name)), value)


def _one_of_each(default: PretrainedConfig) -> dict[str, Any]:
    """Layers of each kind that the configuration lists, two at least: the lists, and how many layers there are."""
    count = _own(default).get("num_hidden_layers")
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list) and value and len(value) == count and name != "hidden_sizes"
    }
    if not lists:
        return {}
    places = {name for name, value in lists.items() if value == list(range(len(value)))}  # not kinds
    of_kinds = [name for name in lists if name not in places]
    kinds = list(zip(*(lists[name] for name in of_kinds), strict=True)) or [()] * len(next(iter(lists.values())))
    chosen = list(dict.fromkeys(kinds) if len(set(map(str, kinds))) > 1 else kinds[:2])
    shorter = {name: [_smaller(name, kind[i]) for kind in chosen] for i, name in enumerate(of_kinds)}
    shorter |= {name: list(range(len(chosen))) for name in places}
    return {**shorter, "num_hidden_layers": len(chosen)}


def _smaller(name: str, value: Any) -> Any:
    return min(value, _most(name, value)) if isinstance(value, int) and not isinstance(value, bool) else value


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
TINY_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
PARTICULAR: dict[str, dict[str, Any]] = {  # by the class of a configuration, or of a model
    "BambaConfig": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "BltConfig": {"use_cache": False},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE}},
    "DbrxAttentionConfig": {"rope_theta": 10_000.0, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Dots3NoteTextConfig": {
        **{f"swa_{name}": value for name, value in TINY_ATTENTION.items()},
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "EncoderDecoderConfig": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "EsmConfig": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "FalconH1Config": {"mamba_d_head": 16, "mamba_d_ssm": 64},
    "GraniteMoeHybridConfig": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"]},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LongT5Config": {"decoder_start_token_id": 0},
    "Mamba2Config": {"head_dim": 32},
    "MinistralConfig": {"head_dim": 16},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PerceiverConfig": {
        "d_latents": 64,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
        "max_position_embeddings": LENGTH,
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32), "attn_layers": ("local", "lsh")},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "SwitchTransformersConfig": {"decoder_start_token_id": 0},
    "T5Config": {"decoder_start_token_id": 0},
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 3200},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["hybrid"]},
    "xLSTMConfig": {"chunk_size": 16, "hidden_size": 128},
}
