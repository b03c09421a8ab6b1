"""Residual networks (He et al. 2016) with batch normalization, of basic or bottleneck blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def _conv_norm(before: int, after: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _conv_norm(before, width, 3, stride)
        self.second = _conv_norm(width, width, 3)
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else _conv_norm(before, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), inplace=True)
        return F.relu(self.second(y) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a widening 1x1 convolution, and a shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.narrow = _conv_norm(before, width, 1)
        self.middle = _conv_norm(width, width, 3, stride)
        self.widen = _conv_norm(width, after, 1)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else _conv_norm(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.narrow(x), inplace=True)
        y = F.relu(self.middle(y), inplace=True)
        return F.relu(self.widen(y) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks and a linear classifier.

    ``blocks`` lists the blocks of each stage; ``base`` is the width of the first stage, doubled at each later one.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, ...],
        classes: int,
        base: int = 64,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, base, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(base),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        before = base
        for stage, count in enumerate(blocks):
            width = base * 2**stage
            for i in range(count):
                stages.append(block(before, width, stride=2 if stage and i == 0 else 1))
                before = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet18(classes: int, base: int = 64, channels: int = 3) -> ResNet:
    """The residual network of 18 layers."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, base, channels)


def resnet50(classes: int, base: int = 64, channels: int = 3) -> ResNet:
    """The residual network of 50 layers."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, base, channels)
