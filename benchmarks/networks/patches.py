"""MLP-Mixer, which sees an image as patches."""

from __future__ import annotations

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
