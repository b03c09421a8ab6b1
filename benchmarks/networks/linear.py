"""Networks of linear layers: a perceptron, and those that see an image as patches."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear, ReLU and dropout, several times, then a linear classifier."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        widths = [features] + [hidden] * layers
        parts = ((nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.1)) for before, after in pairwise(widths))
        self.body = nn.Sequential(*(nn.Sequential(*layers) for layers in parts))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021): perceptrons along the patches and along the channels, in turn."""

    def __init__(self, image: int, patch: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        length = (image // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.tokens = nn.ModuleList(_mlp(length, 2 * length) for _ in range(layers))
        self.channels = nn.ModuleList(_mlp(width, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(dim=1))


class Attention(nn.Module):
    """Multi-head self-attention by PyTorch's fused operator, with dropout inside it; or in products, without."""

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            q, k, v = qkv
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        else:  # as timm wrote it for PyTorch 1.12
            q, k, v = qkv.unbind(0)
            y = ((q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalized before, with a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, fused)
        inner = nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout)
        self.mlp = nn.Sequential(*inner, nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021): patches as tokens, a class token, blocks, a linear classifier."""

    def __init__(
        self, image: int, patch: int, width: int, layers: int, heads: int, classes: int, dropout: float = 0.1,
        *, fused: bool = True
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, fused) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(self.dropout(x + self.position))
        return self.head(self.norm(x[:, 0]))
