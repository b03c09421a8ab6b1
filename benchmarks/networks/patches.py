"""Networks that see an image as patches: MLP-Mixer, and a transformer with shifted windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class WindowBlock(nn.Module):
    """Attention within windows, shifted or not, with a learned bias by relative position; then a perceptron."""

    def __init__(self, side: int, window: int, width: int, heads: int, *, shifted: bool) -> None:
        super().__init__()
        self.window, self.heads, self.shift = window, heads, window // 2 if shifted else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = _mlp(width, 2 * width)
        self.bias = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        self.register_buffer("mask", self._mask(side))

    def _mask(self, side: int) -> Tensor:
        """What a shift has put side by side from two edges of the image does not attend to each other."""
        regions = torch.zeros(1, side, side, 1)
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift or None), slice(-self.shift or side, None))
        for i, rows in enumerate(cuts):
            for j, columns in enumerate(cuts):
                regions[:, rows, columns] = 3 * i + j
        flat = self._windows(regions).squeeze(-1)
        return (flat[:, None, :] != flat[:, :, None]).float() * -100.0 * bool(self.shift)

    def _windows(self, x: Tensor) -> Tensor:
        """(batch, side, side, width) -> (batch * windows, window * window, width)."""
        n, side, _, width = x.shape
        x = x.view(n, side // self.window, self.window, side // self.window, self.window, width)
        return x.transpose(2, 3).reshape(-1, self.window**2, width)

    def forward(self, x: Tensor) -> Tensor:
        n, side, _, width = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), dims=(1, 2)) if self.shift else self.norm1(x)
        y = self._attention(self._windows(y))
        count = side // self.window
        y = y.view(n, count, count, self.window, self.window, width).transpose(2, 3).reshape(n, side, side, width)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), dims=(1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))

    def _attention(self, y: Tensor) -> Tensor:
        windows, length, width = y.shape
        q, k, v = self.qkv(y).view(windows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.bias[self.index].permute(2, 0, 1)
        scores = scores.view(-1, len(self.mask), self.heads, length, length) + self.mask[:, None]
        weights = F.dropout(scores.view(windows, self.heads, length, length).softmax(-1), 0.1, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(windows, length, width))


class Swin(nn.Module):
    """Two blocks, four patches merged into one, two blocks (after Liu et al. 2021)."""

    def __init__(self, image: int, patch: int, width: int, heads: int, classes: int, window: int = 2) -> None:
        super().__init__()
        side = image // patch
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.first = nn.Sequential(
            WindowBlock(side, window, width, heads, shifted=False),
            WindowBlock(side, window, width, heads, shifted=True),
        )
        self.merge = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False))
        self.second = WindowBlock(side // 2, window, 2 * width, heads, shifted=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.patches(x).permute(0, 2, 3, 1))
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.second(self.merge(torch.cat(corners, dim=-1)))
        return self.head(x.mean(dim=(1, 2)))
