"""MobileNetV2 (Sandler et al. 2018): inverted residuals with depthwise convolutions, ReLU6, dropout."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

# expansion, channels, blocks, stride of the first block: the paper's table 2
PAPER = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_norm_relu6(before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Widen, filter each channel on its own, narrow; a shortcut where the shape stays."""

    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        widen = [_conv_norm_relu6(before, wide)] if expansion > 1 else []
        self.body = nn.Sequential(
            *widen,
            _conv_norm_relu6(wide, wide, kernel=3, stride=stride, groups=wide),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + y if self.shortcut else y


class MobileNetV2(nn.Module):
    """The whole network; ``width`` scales all channels; ``table``: other blocks than the paper's."""

    def __init__(
        self,
        classes: int,
        width: float = 1.0,
        dropout: float = 0.2,
        table: Iterable[tuple[int, int, int, int]] = PAPER,
    ) -> None:
        super().__init__()
        before = max(8, int(32 * width))
        layers: list[nn.Module] = [_conv_norm_relu6(3, before, kernel=3, stride=2)]
        for expansion, channels, blocks, stride in table:
            after = max(8, int(channels * width))
            for i in range(blocks):
                layers.append(InvertedResidual(before, after, stride if i == 0 else 1, expansion))
                before = after
        last = max(32, int(1280 * width))
        layers.append(_conv_norm_relu6(before, last))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean(dim=(2, 3)))
