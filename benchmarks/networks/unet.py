"""U-Nets (Ronneberger et al. 2015), plain and with attention: the way down is remembered on the way up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.second(self.first(x))


class _Attention(nn.Module):
    """Each pixel looks at all others."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        seen = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(seen.transpose(-1, -2).reshape(x.shape))


class AttentionUNet(nn.Module):
    """The U-Net of diffusion models (Ho et al. 2020), less the time: residual blocks, and attention below the top."""

    def __init__(self, base: int = 32, channels: int = 3, heads: int = 4) -> None:
        super().__init__()

        def blocks(before: int, after: int) -> nn.Sequential:
            attention = _Attention(after, heads) if after > base else nn.Identity()
            return nn.Sequential(_Residual(before, after), _Residual(after, after), attention)

        widths = [base, 2 * base, 4 * base]
        self.stem, self.head = nn.Conv2d(channels, base, 3, padding=1), nn.Conv2d(base, channels, 3, padding=1)
        self.down = nn.ModuleList(blocks(before, after) for before, after in zip([base, *widths], widths, strict=False))
        self.halve = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.bottom = nn.Sequential(blocks(widths[-1], widths[-1]), _Residual(widths[-1], widths[-1]))
        self.enlarge = nn.Upsample(scale_factor=2.0)
        self.up = nn.ModuleList(
            blocks(before + after, after)
            for before, after in zip(reversed([*widths, widths[-1]]), reversed(widths), strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for level, block in enumerate(self.down):
            x = block(self.halve[level - 1](x) if level else x)
            skips.append(x)
        x = self.bottom(x)
        for level, block in enumerate(self.up):
            x = block(torch.cat([skips.pop(), self.enlarge(x) if level else x], dim=1))
        return self.head(x)
