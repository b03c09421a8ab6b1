"""What networks can learn from without a download: the text that ships with Python, and digits as clocks show them."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]
SEGMENTS = ((0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 1, 2), (0, 2, 1, 2), (0, 1, 0, 2), (0, 0, 0, 1), (0, 1, 1, 1))
LIT = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")  # of each digit


def documentation() -> tuple[Tensor, str]:
    """(N,) int64: the characters of Python's documentation topics as indices into the alphabet, and that alphabet."""
    text = "\n".join(topics[topic] for topic in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), alphabet


def text_batches(text: Tensor, count: int, size: int, length: int, seed: int = 0) -> list[Batch]:
    """Batches of passages that begin anywhere: (size, length) each, and the character after each of theirs."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, size), generator=generator)
    passages = text[starts[..., None] + torch.arange(length + 1)]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in passages]


def digit_batches(count: int, size: int, pixels: int, seed: int = 0) -> list[Batch]:
    """Batches of digits in seven segments, each of its own place, size, slant and stroke, with noise.

    (size, 1, pixels, pixels) float32 from about 0 to 1, and (size,) int64, which digit each is.
    """
    generator = torch.Generator().manual_seed(seed)
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
