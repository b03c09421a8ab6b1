"""GPT-2 (Radford et al. 2019) as the transformers library writes it, from a small configuration, untrained."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


class GPT2(nn.Module):
    """Tokens in, logits out."""

    def __init__(
        self, vocabulary: int, positions: int, width: int, layers: int, heads: int, attention: Literal["eager", "sdpa"]
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocabulary, "n_positions": positions, "n_embd": width, "n_layer": layers}
        ends = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(**sizes, n_head=heads, attn_implementation=attention, **ends)
        self.transformer = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.transformer(tokens).logits
