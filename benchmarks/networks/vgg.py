"""A chain of convolutions after VGG (Simonyan & Zisserman 2015), without batch normalization."""

from __future__ import annotations

from torch import Tensor, nn


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each stage ended by a max-pool, then a classifier with dropout.

    ``stages`` lists for each stage its channels and its number of convolutions.
    """

    def __init__(self, stages: tuple[tuple[int, int], ...], classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, convolutions in stages:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * channels, 2 * channels),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(2 * channels, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))
