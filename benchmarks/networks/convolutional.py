"""Convolutional networks of many shapes, each as small as still shows what is peculiar to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv_norm(
    before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        act(),
    )


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all (Hu et al. 2018)."""

    def __init__(self, width: int, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        narrow = max(4, width // 4)
        self.gate = nn.Sequential(nn.Conv2d(width, narrow, 1), act(), nn.Conv2d(narrow, width, 1), gate())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(F.adaptive_avg_pool2d(x, 1))


class GatedResidual(nn.Module):
    """An inverted residual with a gate; ``drop``: the probability that a sample skips it (stochastic depth)."""

    def __init__(
        self,
        before: int,
        after: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        gate: type[nn.Module],
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        wide = 3 * before
        self.body = nn.Sequential(
            _conv_norm(before, wide, act=act),
            _conv_norm(wide, wide, kernel, stride, groups=wide, act=act),
            SqueezeExcitation(wide, nn.ReLU if gate is nn.Hardsigmoid else act, gate),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut, self.drop = stride == 1 and before == after, drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if not self.shortcut:
            return y
        if self.training and self.drop:
            keep = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop
            y = y * keep / (1 - self.drop)
        return x + y


def mobilenet_v3(classes: int) -> nn.Module:
    """Hard swish, squeeze and excitation with hard sigmoids (Howard et al. 2019)."""
    act, gate = nn.Hardswish, nn.Hardsigmoid
    return nn.Sequential(
        _conv_norm(3, 16, 3, 2, act=act),
        GatedResidual(16, 16, 3, 1, nn.ReLU, gate),
        GatedResidual(16, 24, 5, 2, act, gate),
        GatedResidual(24, 24, 5, 1, act, gate),
        _conv_norm(24, 48, act=act),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 64),
        nn.Hardswish(),
        nn.Dropout(0.2),
        nn.Linear(64, classes),
    )


def efficientnet(classes: int) -> nn.Module:
    """SiLU, squeeze and excitation, stochastic depth (Tan & Le 2019)."""
    act, gate = nn.SiLU, nn.Sigmoid
    return nn.Sequential(
        _conv_norm(3, 16, 3, 2, act=act),
        GatedResidual(16, 16, 3, 1, act, gate, drop=0.2),
        GatedResidual(16, 24, 5, 2, act, gate),
        GatedResidual(24, 24, 5, 1, act, gate, drop=0.2),
        _conv_norm(24, 48, act=act),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(48, classes),
    )


class FCN(nn.Module):
    """A fully convolutional network (Long et al. 2015).

    Scores at two depths, the coarse ones widened by transposed convolution, all upsampled to the size of the image.
    """

    def __init__(self, classes: int, width: int = 12) -> None:
        super().__init__()
        self.fine = nn.Sequential(_conv_norm(3, width, 3), nn.MaxPool2d(2), _conv_norm(width, width, 3))
        self.coarse = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), _conv_norm(width, 2 * width, 3), nn.Dropout2d(0.3))
        self.fine_scores, self.coarse_scores = nn.Conv2d(width, classes, 1), nn.Conv2d(2 * width, classes, 1)
        self.widen = nn.ConvTranspose2d(classes, classes, 4, stride=2, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        scores = self.fine_scores(fine) + self.widen(self.coarse_scores(self.coarse(fine)))
        return F.interpolate(scores, size=x.shape[2:], mode="bilinear", align_corners=False)


class InceptionBlock(nn.Module):
    """Four branches side by side, concatenated (Szegedy et al. 2016): one has its 5x5 filter in two steps."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.point = _conv_norm(before, width)
        self.three = nn.Sequential(_conv_norm(before, width), _conv_norm(width, width, 3))
        self.five = nn.Sequential(_conv_norm(before, width), _conv_norm(width, width, 3), _conv_norm(width, width, 3))
        self.pool = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv_norm(before, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Inception(nn.Module):
    """Two blocks and, in training, the scores of a second classifier after the first of them."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = _conv_norm(3, 16, 3, 2)
        self.first, self.second = InceptionBlock(16, width), InceptionBlock(4 * width, width)
        self.early, self.head = nn.Linear(4 * width, classes), nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.stem(x))
        early = self.early(F.adaptive_avg_pool2d(x, 1).flatten(1))
        x = self.second(F.max_pool2d(x, 3, stride=2, padding=1))
        return self.head(F.dropout(x.mean(dim=(2, 3)), 0.4, self.training)), early
