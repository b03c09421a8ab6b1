"""A U-Net (Ronneberger et al. 2015): the way down is remembered on the way up, by concatenation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _double_conv(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """``depth`` halvings of the image, and as many doublings with skip connections; a class for each pixel."""

    def __init__(self, classes: int, depth: int = 3, base: int = 16, channels: int = 3) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double_conv(before, after) for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.raise_ = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(_double_conv(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()  # the bottom is no skip
        for raise_, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([skips.pop(), raise_(x)], dim=1))
        return self.head(x)
