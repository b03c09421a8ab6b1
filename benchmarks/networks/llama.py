"""A Llama as people write it for one GPU: by compiled `flex_attention` or in one call, with norms by Triton or not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MakeNorm = Callable[[int], nn.Module]
fused_attention = torch.compile(flex_attention, dynamic=False)  # plainly it is dense ops, in plain PyTorch too


def _is_before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _real_device() -> torch.device:
    """The device of new tensors; the CPU instead of meta, where no mask could be computed."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


class Block(nn.Module):
    """Attention with grouped heads, and a gated network for each position."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, norm: MakeNorm) -> None:
        super().__init__()
        self.sizes = heads, groups, width // heads
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * groups) * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        # without a mask attention is PyTorch's own
        heads, groups, each = self.sizes
        made = self.qkv(self.norms[0](x)).unflatten(-1, (heads + 2 * groups, each)).transpose(1, 2)
        q, k, v = made.split([heads, groups, groups], dim=1)
        q, k = (t * cos + torch.cat([-t[..., each // 2 :], t[..., : each // 2]], -1) * sin for t in (q, k))
        if mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = fused_attention(q, k, v, block_mask=mask, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A language model, by default of the size of TinyLlama, that gives its loss."""

    def __init__(
        self, norm: MakeNorm = nn.RMSNorm, *, flex: bool = False, length: int = 2048, layers: int = 22,
        width: int = 2048, inner: int = 5632, heads: int = 32, groups: int = 4, words: int = 32000
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, inner, heads, groups, norm) for _ in range(layers))
        self.norm, self.head = norm(width), nn.Linear(width, words, bias=False)
        self.mask = create_block_mask(_is_before, None, None, length, length, device=_real_device()) if flex else None
        each = width // heads
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, each, 2) / each)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
