"""VGG (Simonyan & Zisserman 2015): chains of 3x3 convolutions without batch normalization, tiny and at full size."""

from __future__ import annotations

from torch import Tensor, nn


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each stage ended by a max-pool, then a classifier with dropout.

    ``stages`` lists for each stage its channels and its number of convolutions.
    """

    def __init__(self, stages: tuple[tuple[int, int], ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, convolutions in stages:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = self.make_classifier(channels, classes)

    def make_classifier(self, channels: int, classes: int) -> nn.Sequential:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * channels, 2 * channels),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(2 * channels, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class VGG16(VGG):
    """Configuration D of the paper, for images of 224 x 224."""

    convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)  # before each pool

    def __init__(self, classes: int) -> None:
        super().__init__(tuple(zip((64, 128, 256, 512, 512), self.convolutions, strict=True)), classes)

    def make_classifier(self, channels: int, classes: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(channels * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class VGG19(VGG16):
    """Configuration E of the paper."""

    convolutions = (2, 2, 4, 4, 4)
