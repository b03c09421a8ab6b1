"""Two networks at full size that are only traced: VGG-16 and DenseNet-121."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VGG16(nn.Module):
    """Configuration D of Simonyan & Zisserman (2015), for images of 224 x 224: no batch normalization, dropout."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.classifier(self.features(x).flatten(1))


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


class DenseNet121(nn.Module):
    """The densely connected network of 121 layers (Huang et al. 2017), growth 32, halved between its blocks."""

    def __init__(self, classes: int, growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for i, layers in enumerate((6, 12, 24, 16)):
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
