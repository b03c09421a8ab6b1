"""Networks at the sizes of their papers, two of which are made small, too."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.vgg import VGG16


def _norm_relu_conv(before: int, after: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(before),
        nn.ReLU(inplace=True),
        nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False),
    )


class DenseLayer(nn.Module):
    """Reads all that its block has made so far, concatenated, and adds ``growth`` channels."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.narrow = _norm_relu_conv(before, 4 * growth, 1)
        self.filter = _norm_relu_conv(4 * growth, growth, 3)

    def forward(self, features: list[Tensor]) -> Tensor:
        """The new channels."""
        return self.filter(self.narrow(torch.cat(features, dim=1)))


class DenseBlock(nn.Module):
    """Layers each of which reads all before it."""

    def __init__(self, before: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(before + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """What came in and what every layer added."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """The densely connected network (Huang et al. 2017), halved between its blocks; by default that of 121 layers."""

    def __init__(self, classes: int, growth: int = 32, blocks: tuple[int, ...] = (6, 12, 24, 16)) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for i, layers in enumerate(blocks):
            if i:
                parts += [_norm_relu_conv(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            parts.append(DenseBlock(width, growth, layers))
            width += layers * growth
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


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
        """Logits of pixels."""
        eighth = self.to_8(x)
        sixteenth = self.to_16(eighth)
        scores = self.widen[0](self.to_32(sixteenth)) + self.scores_16(sixteenth)
        return self.last(self.widen[1](scores) + self.scores_8(eighth))


class SegNet(nn.Module):
    """VGG-16 with batch norms down and, by the places of the maxima, up again (Badrinarayanan et al. 2017)."""

    def __init__(
        self,
        classes: int,
        widths: tuple[int, ...] = (64, 128, 256, 512, 512),
        depths: tuple[int, ...] = (2, 2, 3, 3, 3),
    ) -> None:
        super().__init__()
        down, up = [], []
        before = 3
        for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            steps = [before, *[width] * depth]
            down.append(self._stage(steps))
            up.append(self._stage([width] * depth + [widths[i - 1] if i else width]))
            before = width
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(reversed(up))
        self.head = nn.Conv2d(widths[0], classes, 3, padding=1)

    @staticmethod
    def _stage(widths: list[int]) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels."""
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
