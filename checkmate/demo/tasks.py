"""Two networks with data that needs no download: the text that ships with Python, and digits of clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[..., Tensor]
Batch = tuple[Tensor, ...]
SEGMENTS = ((0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 1, 2), (0, 2, 1, 2), (0, 1, 0, 2), (0, 0, 0, 1), (0, 1, 1, 1))
LIT = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")  # of each digit


@dataclass(frozen=True)
class Task:
    """A network to train: its description, step and batches."""

    title: str
    network: Callable[[], nn.Module]
    batches: list[Batch]

    def make(self) -> tuple[nn.Module, Step]:
        """The network, with the same parameters each time, and the step that gives its loss."""
        torch.manual_seed(0)
        module = self.network()
        return module, step_of(module)


def text_task(steps: int) -> Task:
    """A transformer that reads Python's documentation."""
    text, alphabet = documentation()
    network = partial(Transformer, len(alphabet), positions=64, width=64, layers=4, heads=4)
    title = (
        f"A transformer of 4 layers, on {len(text):,} characters of Python's documentation, 16 passages of 64 a step"
    )
    return Task(title, network, text_batches(text, steps, size=16, length=64))


def digits_task(steps: int) -> Task:
    """A residual network that names digits."""
    network = partial(Bottlenecks, (2, 2, 2, 2), width=16, classes=len(LIT), channels=1)
    title = "A residual network of 26 layers, on digits as clocks show them, 16 images of 64 x 64 a step"
    return Task(title, network, digit_batches(steps, size=16, pixels=64))


def step_of(module: nn.Module) -> Step:
    """The step of a network, which ends in the cross entropy."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x).flatten(0, -2), y.flatten())

    return step


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
        return self.head(self.norm(x))


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
    """A network in the manner of ResNet-50, with this many blocks in each stage: images in, logits out."""

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
        return self.head(self.body(x).mean((2, 3)))


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


def documentation() -> tuple[Tensor, str]:
    """(N,) int64: the characters of Python's documentation topics as indices into the alphabet, and the alphabet."""
    text = "\n".join(topics[topic] for topic in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), alphabet


def text_batches(text: Tensor, count: int, size: int, length: int) -> list[Batch]:
    """Batches of random passages, (size, length) each, and the character after each of theirs."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length, (count, size), generator=generator)
    passages = text[starts[..., None] + torch.arange(length + 1)]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in passages]


def digit_batches(count: int, size: int, pixels: int) -> list[Batch]:
    """Batches of seven-segment digits with noise, each with its own place, size, slant and stroke.

    (size, 1, pixels, pixels) float32 from about 0 to 1, and (size,) int64, which digit each is.
    """
    generator = torch.Generator().manual_seed(0)
    lit = torch.tensor([[str(segment) in digit for segment in range(len(SEGMENTS))] for digit in LIT])
    x0, y0, x1, y1 = torch.tensor(SEGMENTS, dtype=torch.float32).T[..., None, None]
    down, across = torch.meshgrid(*2 * [torch.linspace(-1, 1, pixels)], indexing="ij")
    batches: list[Batch] = []
    for _ in range(count):
        labels = torch.randint(len(LIT), (size,), generator=generator)
        drawn = torch.rand(5, size, 1, 1, 1, generator=generator)
        height, slant, stroke = 0.4 + 0.3 * drawn[0], 0.4 * drawn[1] - 0.2, 0.1 + 0.1 * drawn[2]
        y = (down - 0.4 * drawn[3] + 0.2) / height + 1  # of segments' ends 0, 1 and 2
        x = (across - 0.4 * drawn[4] + 0.2) / height + slant * (y - 1) + 0.5
        apart = torch.hypot(x - x.clamp(x0, x1), y - y.clamp(y0, y1))  # (size, segments, pixels, pixels)
        ink = ((stroke - apart) / 0.05).sigmoid() * lit[labels][..., None, None]
        noise = 0.1 * torch.randn(size, 1, pixels, pixels, generator=generator)
        batches.append((ink.amax(1, keepdim=True) + noise, labels))
    return batches
