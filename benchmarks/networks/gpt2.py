"""GPT-2 (Radford et al. 2019) as the transformers library writes it, from a small configuration, untrained."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


class GPT2(nn.Module):
    """Tokens in, logits out."""

    def __init__(
        self,
        vocabulary: int,
        positions: int,
        width: int,
        layers: int,
        heads: int,
        attention: Literal["eager", "sdpa"],
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            attn_implementation=attention,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.transformer = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.transformer(tokens).logits
