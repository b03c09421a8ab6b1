"""Networks that tell what an image shows by convolutions: those of the papers, with sizes to be given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[[], nn.Module]
RELU = partial(nn.ReLU, inplace=True)
RELU6 = partial(nn.ReLU6, inplace=True)


def conv_norm(
    before: int, after: int, kernel: int = 1, stride: int = 1, act: Make | None = nn.ReLU, **options: Any
) -> nn.Sequential:
    """A convolution that keeps the size of images, but for its stride, a batch norm, and an activation."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, **{"bias": False, **options})
    return nn.Sequential(convolution, nn.BatchNorm2d(after), *([] if act is None else [act()]))


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each stage ended by a max-pool, then a classifier with dropout.

    Simonyan & Zisserman 2015, without batch norms. ``stages`` lists for each stage its channels and its number of
    convolutions.
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
        small = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 2 * channels)
        return nn.Sequential(*small, RELU(), nn.Dropout(0.5), nn.Linear(2 * channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class VGG16(VGG):
    """Configuration D of the paper, for images of 224 x 224; others by their convolutions before each pool."""

    def __init__(self, classes: int, convolutions: tuple[int, ...] = (2, 2, 3, 3, 3)) -> None:
        super().__init__(tuple(zip((64, 128, 256, 512, 512), convolutions, strict=True)), classes)

    def make_classifier(self, channels: int, classes: int) -> nn.Sequential:
        first = nn.Linear(channels * 7 * 7, 4096), RELU(), nn.Dropout(0.5)
        return nn.Sequential(*first, nn.Linear(4096, 4096), RELU(), nn.Dropout(0.5), nn.Linear(4096, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


_plain = partial(conv_norm, act=None)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _plain(before, width, 3, stride)
        self.second = _plain(width, width, 3)
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else _plain(before, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), inplace=True)
        return F.relu(self.second(y) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a widening 1x1 convolution, and a shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.narrow = _plain(before, width, 1)
        self.middle = _plain(width, width, 3, stride)
        self.widen = _plain(width, after, 1)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else _plain(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.narrow(x), inplace=True)
        y = F.relu(self.middle(y), inplace=True)
        return F.relu(self.widen(y) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks and a linear classifier (He et al. 2016).

    ``blocks`` lists the blocks of each stage; ``base`` is the width of the first stage, doubled at each later one.
    """

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, ...], classes: int, base: int = 64
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_norm(3, base, 7, 2, act=RELU), nn.MaxPool2d(3, stride=2, padding=1))
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


def resnet18(classes: int, base: int = 64) -> ResNet:
    """The residual network of 18 layers."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, base)


def resnet50(classes: int, base: int = 64) -> ResNet:
    """The residual network of 50 layers."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, base)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all (Hu et al. 2018)."""

    def __init__(self, width: int, act: Make, gate: Make) -> None:
        super().__init__()
        narrow = max(4, width // 4)
        self.gate = nn.Sequential(nn.Conv2d(width, narrow, 1), act(), nn.Conv2d(narrow, width, 1), gate())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(F.adaptive_avg_pool2d(x, 1))


class InvertedResidual(nn.Module):
    """Widen, filter each channel on its own, narrow; a shortcut where the shape stays.

    ``gate``: of a squeeze and excitation; ``drop``: the probability that a sample skips it (stochastic depth).
    """

    def __init__(
        self, before: int, after: int, stride: int, expansion: int = 3, *, kernel: int = 3,
        act: Make = RELU6, gate: Make | None = None, drop: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__()
        wide = before * expansion
        body = [conv_norm(before, wide, act=act)] if expansion > 1 else []
        body.append(conv_norm(wide, wide, kernel, stride, groups=wide, act=act))
        if gate is not None:
            body.append(SqueezeExcitation(wide, nn.ReLU if gate is nn.Hardsigmoid else act, gate))
        self.body = nn.Sequential(*body, *conv_norm(wide, after, act=None))
        self.shortcut, self.drop = stride == 1 and before == after, drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if not self.shortcut:
            return y
        if self.training and self.drop:
            keep = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop
            y = y * keep / (1 - self.drop)
        return x + y


PAPER = (  # expansion, channels, blocks, stride of the first block: table 2 of MobileNetV2
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


class MobileNetV2(nn.Module):
    """Inverted residuals, ReLU6, dropout (Sandler et al. 2018).

    ``width`` scales all channels; ``table``: other blocks than the paper's.
    """

    def __init__(self, classes: int, width: float = 1.0, *, table: Iterable[tuple[int, int, int, int]] = PAPER) -> None:
        super().__init__()
        before = max(8, int(32 * width))
        layers: list[nn.Module] = [conv_norm(3, before, 3, stride=2, act=RELU6)]
        for expansion, channels, blocks, stride in table:
            after = max(8, int(channels * width))
            for i in range(blocks):
                layers.append(InvertedResidual(before, after, stride if i == 0 else 1, expansion))
                before = after
        last = max(32, int(1280 * width))
        layers.append(conv_norm(before, last, act=RELU6))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))


def _gated(act: Make, gate: Make, first_act: Make, drop: float) -> nn.Sequential:
    return nn.Sequential(
        conv_norm(3, 16, 3, 2, act=act),
        InvertedResidual(16, 16, 1, act=first_act, gate=gate, drop=drop),
        InvertedResidual(16, 24, 2, kernel=5, act=act, gate=gate),
        InvertedResidual(24, 24, 1, kernel=5, act=act, gate=gate, drop=drop),
        conv_norm(24, 48, act=act),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def mobilenet_v3(classes: int) -> nn.Module:
    """Hard swish, squeeze and excitation with hard sigmoids (Howard et al. 2019)."""
    body = _gated(nn.Hardswish, nn.Hardsigmoid, nn.ReLU, drop=0.0)
    return nn.Sequential(*body, nn.Linear(48, 64), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(64, classes))


def efficientnet(classes: int) -> nn.Module:
    """SiLU, squeeze and excitation, stochastic depth (Tan & Le 2019)."""
    return nn.Sequential(*_gated(nn.SiLU, nn.Sigmoid, nn.SiLU, drop=0.2), nn.Dropout(0.2), nn.Linear(48, classes))


class InceptionBlock(nn.Module):
    """Four branches side by side, concatenated (Szegedy et al. 2016): one has its 5x5 filter in two steps."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.point = conv_norm(before, width)
        self.three = nn.Sequential(conv_norm(before, width), conv_norm(width, width, 3))
        self.five = nn.Sequential(conv_norm(before, width), conv_norm(width, width, 3), conv_norm(width, width, 3))
        self.pool = nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv_norm(before, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Inception(nn.Module):
    """Two blocks and, in training, the scores of a second classifier after the first of them."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = conv_norm(3, 16, 3, 2)
        self.first, self.second = InceptionBlock(16, width), InceptionBlock(4 * width, width)
        self.early, self.head = nn.Linear(4 * width, classes), nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.stem(x))
        early = self.early(F.adaptive_avg_pool2d(x, 1).flatten(1))
        x = self.second(F.max_pool2d(x, 3, stride=2, padding=1))
        return self.head(F.dropout(x.mean(dim=(2, 3)), 0.4, self.training)), early


def _norm_relu_conv(before: int, after: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(before), RELU(), convolution)


class DenseLayer(nn.Module):
    """Reads all that its block has made so far, concatenated, and adds ``growth`` channels."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.narrow = _norm_relu_conv(before, 4 * growth, 1)
        self.filter = _norm_relu_conv(4 * growth, growth, 3)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.filter(self.narrow(torch.cat(features, dim=1)))


class DenseBlock(nn.Module):
    """Layers each of which reads all before it."""

    def __init__(self, before: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(before + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """The input, and the channels that each layer adds to it."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """The densely connected network (Huang et al. 2017), halved between its blocks; by default that of 121 layers."""

    def __init__(self, classes: int, growth: int = 32, blocks: tuple[int, ...] = (6, 12, 24, 16)) -> None:
        super().__init__()
        width = 2 * growth
        parts: list[nn.Module] = [*conv_norm(3, width, 7, 2, act=RELU), nn.MaxPool2d(3, stride=2, padding=1)]
        for i, layers in enumerate(blocks):
            if i:
                parts += [_norm_relu_conv(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            parts.append(DenseBlock(width, growth, layers))
            width += layers * growth
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))
