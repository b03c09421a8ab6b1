"""Networks that give each pixel of an image a class, or another image, by convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.convolutional import RELU, VGG16, conv_norm


def _double_conv(before: int, after: int) -> nn.Sequential:
    first, second = (conv_norm(width, after, 3, act=RELU, bias=True) for width in (before, after))
    return nn.Sequential(*first, *second)


class UNet(nn.Module):
    """The U-Net (Ronneberger et al. 2015): the way down is remembered on the way up.

    ``depth`` halvings of the image, and as many doublings with skip connections.
    """

    def __init__(self, classes: int, depth: int = 3, base: int = 16) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double_conv(*pair) for pair in pairwise([3, *widths]))
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

    def __init__(self, base: int = 32) -> None:
        super().__init__()

        def blocks(before: int, after: int) -> nn.Sequential:
            attention = _Attention(after, heads=4) if after > base else nn.Identity()
            return nn.Sequential(_Residual(before, after), _Residual(after, after), attention)

        widths = [base, 2 * base, 4 * base]
        self.stem, self.head = nn.Conv2d(3, base, 3, padding=1), nn.Conv2d(base, 3, 3, padding=1)
        self.down = nn.ModuleList(blocks(*pair) for pair in pairwise([base, *widths]))
        self.halve = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for width in widths[:-1])
        self.bottom = nn.Sequential(blocks(widths[-1], widths[-1]), _Residual(widths[-1], widths[-1]))
        self.enlarge = nn.Upsample(scale_factor=2.0)
        ways_up = pairwise(reversed([*widths, widths[-1]]))
        self.up = nn.ModuleList(blocks(before + after, after) for before, after in ways_up)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for level, block in enumerate(self.down):
            x = block(self.halve[level - 1](x) if level else x)
            skips.append(x)
        x = self.bottom(x)
        for level, block in enumerate(self.up):
            x = block(torch.cat([skips.pop(), self.enlarge(x) if level else x], dim=1))
        return self.head(x)


class FCN(nn.Module):
    """A fully convolutional network (Long et al. 2015).

    Scores at two depths, the coarse ones widened by transposed convolution, all upsampled to the size of the image.
    """

    def __init__(self, classes: int, width: int = 12) -> None:
        super().__init__()
        self.fine = nn.Sequential(conv_norm(3, width, 3), nn.MaxPool2d(2), conv_norm(width, width, 3))
        self.coarse = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), conv_norm(width, 2 * width, 3), nn.Dropout2d(0.3))
        self.fine_scores, self.coarse_scores = nn.Conv2d(width, classes, 1), nn.Conv2d(2 * width, classes, 1)
        self.widen = nn.ConvTranspose2d(classes, classes, 4, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        scores = self.fine_scores(fine) + self.widen(self.coarse_scores(self.coarse(fine)))
        return F.interpolate(scores, size=x.shape[2:], mode="bilinear", align_corners=False)


class FCN8(nn.Module):
    """VGG-16 made convolutional, its scores at three depths summed up (Long et al. 2015), without their crops."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        features = list(VGG16(classes).features)
        pools = [i for i, layer in enumerate(features) if isinstance(layer, nn.MaxPool2d)]
        third, fourth = pools[2] + 1, pools[3] + 1
        self.to_8, self.to_16 = nn.Sequential(*features[:third]), nn.Sequential(*features[third:fourth])
        dense = [nn.Conv2d(512, 4096, 7, padding=3), nn.ReLU(inplace=True), nn.Dropout2d()]
        dense += [nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True), nn.Dropout2d(), nn.Conv2d(4096, classes, 1)]
        self.to_32 = nn.Sequential(*features[fourth:], *dense)
        self.scores_8, self.scores_16 = nn.Conv2d(256, classes, 1), nn.Conv2d(512, classes, 1)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(classes, classes, 4, 2, padding=1, bias=False) for _ in range(2))
        self.last = nn.ConvTranspose2d(classes, classes, 16, stride=8, padding=4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        eighth = self.to_8(x)
        sixteenth = self.to_16(eighth)
        scores = self.widen[0](self.to_32(sixteenth)) + self.scores_16(sixteenth)
        return self.last(self.widen[1](scores) + self.scores_8(eighth))


class SegNet(nn.Module):
    """VGG-16 with batch norms down and, by the places of the maxima, up again (Badrinarayanan et al. 2017)."""

    def __init__(
        self, classes: int, widths: Sequence[int] = (64, 128, 256, 512, 512), depths: Sequence[int] = (2, 2, 3, 3, 3)
    ) -> None:
        super().__init__()
        down, up = [], []
        for before, width, depth in zip([3, *widths], widths, depths, strict=False):
            down.append(self._stage([before, *[width] * depth]))
            up.append(self._stage([*[width] * depth, width if before == 3 else before]))
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(reversed(up))
        self.head = nn.Conv2d(widths[0], classes, 3, padding=1)

    @staticmethod
    def _stage(widths: list[int]) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += conv_norm(before, after, 3, act=RELU)
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        places = []
        for stage in self.down:
            x = stage(x)
            size = list(x.shape[2:])
            x, indices = F.max_pool2d(x, 2, return_indices=True)
            places.append((indices, size))
        for stage in self.up:
            indices, size = places.pop()
            x = stage(F.max_unpool2d(x, indices, [2, 2], output_size=size))
        return self.head(x)
