"""Real data that needs no download: text and letters that ship with Python and with Matplotlib."""

from __future__ import annotations

import string
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TYPEFACES = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmb10", "cmr10", "cmss10", "cmti10", "cmtt10")
LETTERS = string.ascii_letters
Batch = tuple[Tensor, ...]


def documentation() -> tuple[Tensor, str]:
    """(N,) int64: the characters of Python's documentation topics as indices into the alphabet, and that alphabet."""
    text = "\n".join(topics[topic] for topic in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), alphabet


def text_batches(text: Tensor, count: int, size: int, length: int, seed: int = 0) -> list[Batch]:
    """Batches of passages that begin anywhere: (size, length + 1) each, the next character being what is predicted."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, size), generator=generator)
    return [(torch.stack([text[at : at + length + 1] for at in row.tolist()]),) for row in starts]


def typefaces() -> list[Path]:
    """The typefaces for text that come with Matplotlib, without those that only have symbols."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [
        path for path in sorted(folder.glob("*.ttf")) if path.stem.startswith(TYPEFACES) and "Display" not in path.stem
    ]


def letters(pixels: int) -> tuple[Tensor, Tensor]:
    """(N, 1, pixels, pixels) float32 and (N,) int64: each letter of the alphabet, drawn in each typeface; its index."""
    images, labels = [], []
    for path in typefaces():
        font = ImageFont.truetype(path, size=pixels * 5 // 8)
        for label, letter in enumerate(LETTERS):
            image = Image.new("L", (pixels, pixels))
            ImageDraw.Draw(image).text((pixels / 2, pixels / 2), letter, fill=255, font=font, anchor="mm")
            images.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8))
            labels.append(label)
    return torch.stack(images).view(-1, 1, pixels, pixels).float() / 255, torch.tensor(labels)


def letter_batches(images: Tensor, labels: Tensor, count: int, size: int, seed: int = 0) -> list[Batch]:
    """Batches of letters drawn at random, each batch shifted by a few pixels."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[Batch] = []
    for _ in range(count):
        chosen = torch.randint(len(images), (size,), generator=generator)
        shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
        batches.append((images[chosen].roll(shift, dims=(2, 3)), labels[chosen]))
    return batches
