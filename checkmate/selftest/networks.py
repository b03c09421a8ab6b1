"""What checks train: a transformer, bottlenecks of convolutions, and a network of ops that these have not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkmate.selftest.check import Setting

Step = Callable[..., Tensor]


class Transformer(nn.Module):
    """A language model in the manner of GPT-2: tokens in, logits out."""

    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, positions) int64 to (batch, positions, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, 0.1
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.queries_keys_values(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        return x + F.dropout(self.narrower(F.gelu(self.wider(self.second(x)))), self.dropout)


class Bottlenecks(nn.Module):
    """In the manner of ResNet-50, with so many blocks in each stage: images in, logits out."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        stem = [nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(_Bottleneck(channels, width << stage, stride=2 if stage and not i else 1))
                channels = 4 * (width << stage)
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, classes)."""
        out: Tensor = self.head(self.body(x).mean((2, 3)))
        return out


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        wider = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.beside = wider if stride > 1 or channels != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = y.relu() if i < 2 else y
        return (y + self.beside(x)).relu()


class Mixed(nn.Module):
    """Depthwise convolutions, group norm, pooling, upsampling, running sums and lookups: images in, logits out."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.GroupNorm(4, width)
        self.table, self.head = nn.Embedding(16, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes)."""
        y = F.silu(self.norm(self.depthwise(self.into(x))))
        y = y + F.interpolate(F.avg_pool2d(y, 2), scale_factor=2, mode="bilinear")
        rows = y.flatten(2).mean(2).softmax(1).cumsum(1)
        looked_up = self.table((x[:, 0, 0, :1] > 0).long().squeeze(1))
        out: Tensor = self.head(F.dropout(rows.index_select(0, torch.arange(len(rows), device=x.device)) * looked_up))
        return out


def step_of(module: nn.Module) -> Step:
    """The step of a network, that ends in its cross entropy."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = module(x)
        return F.cross_entropy(out.flatten(0, -2), y.flatten())

    return step


def make(name: str, setting: Setting) -> tuple[nn.Module, Step, tuple[Tensor, Tensor]]:
    """The network "transformer", "bottlenecks" or "mixed", its step and a batch: each time the same."""
    torch.manual_seed(0)
    quick = setting.quick or setting.device.type == "cpu"
    with setting.device:
        if name == "transformer":
            vocabulary, positions = (128, 64) if quick else (50257, 512)
            shape = {"width": 64, "layers": 2, "heads": 2} if quick else {"width": 768, "layers": 4, "heads": 12}
            module: nn.Module = Transformer(vocabulary, positions, **shape)
            text = torch.randint(vocabulary, (4, positions + 1))
            batch = text[:, :-1], text[:, 1:]
        else:
            count, side, classes = (4, 32, 10) if quick else (32, 224, 1000)
            width, blocks = (8, (1, 1)) if quick else (64, (3, 4, 6, 3))
            module = Bottlenecks(blocks, width, classes) if name == "bottlenecks" else Mixed(width, classes)
            batch = torch.randn(count, 3, side, side), torch.randint(classes, (count,))
    return module, step_of(module), batch
