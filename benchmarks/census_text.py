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
    (r".*chunk_size|.*chunk_length|.*block_size", 4),
    (r".*d_state|state_size|ssm_state_size", 8),
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
        raise ValueError(f"{name} has {parameters:,} parameters: no rule of benchmarks/census_text.py makes it small.")
    model.train()

    def step(**batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    return model, step, batch_for(model)


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    """Tokens, and labels for them."""
    tokens = torch.randint(10, 40, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": torch.randint(10, 40, (BATCH, LENGTH))}


def configuration(model_class: Any) -> PretrainedConfig:
    """The smallest configuration that the rules make of a model's own."""
    return small(model_class.config_class)


def small(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """A configuration of a kind with what `PARTICULAR` says of it, and the rules of what it does not."""
    said = PARTICULAR.get(kind.__name__, {})
    default = kind()
    found = {**dict(_shrunk(default)), **_one_of_each(default)}
    for part in getattr(kind, "sub_configs", None) or {}:
        if isinstance(getattr(default, part, None), PretrainedConfig):
            found[part] = small(type(getattr(default, part)))
    return kind(**{**found, **said})


def _shrunk(default: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    specials = iter(range(3, 10))
    for field in dataclasses.fields(default):
        value = getattr(default, field.name, None)
        if SPECIAL_TOKEN.fullmatch(field.name):
            if isinstance(value, int) and value >= VOCABULARY:
                yield field.name, next(specials, 9)
            continue
        if isinstance(value, bool) or not isinstance(value, int) or field.default is None:
            continue  # no number, or one that is made from others
        if field.name == "num_key_value_heads" and value == getattr(default, "num_attention_heads", None):
            yield field.name, HEADS
            continue
        for pattern, most in RULES:
            if re.fullmatch(pattern, field.name):
                if value > most:
                    yield field.name, most
                break


def _one_of_each(default: PretrainedConfig) -> dict[str, Any]:
    """Layers of each kind that the configuration lists, two at least: the lists, and how many layers there are."""
    count = getattr(default, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list) and value and len(value) == count and name != "hidden_sizes"
    }
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    chosen = list(dict.fromkeys(kinds) if len(set(map(str, kinds))) > 1 else kinds[:2])
    shorter = {name: [kind[i] for kind in chosen] for i, name in enumerate(lists)}
    return {**shorter, "num_hidden_layers": len(chosen)}


PARTICULAR: dict[str, dict[str, Any]] = {}
