"""The two networks that the demo trains: on the text of Python's documentation, and on digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from checkmate.demo.data import LIT, Batch, digit_batches, documentation, text_batches
from checkmate.selftest.networks import Bottlenecks, Step, Transformer, step_of


@dataclass(frozen=True)
class Task:
    """A network to train: what it is, how to make it with its step, and the batches."""

    title: str
    make: Callable[[], tuple[nn.Module, Step]]
    batches: list[Batch]


def text_task(steps: int) -> Task:
    """A transformer that reads Python's documentation."""
    text, alphabet = documentation()

    def make() -> nn.Module:
        return Transformer(len(alphabet), positions=64, width=64, layers=4, heads=4)

    title = (
        f"A transformer of 4 layers, on {len(text):,} characters of Python's documentation, 16 passages of 64 a step"
    )
    return Task(title, lambda: _of(make), text_batches(text, steps, size=16, length=64))


def digits_task(steps: int) -> Task:
    """A residual network that names digits."""

    def make() -> nn.Module:
        return Bottlenecks((2, 2, 2, 2), width=16, classes=len(LIT), channels=1)

    title = "A residual network of 26 layers, on digits as clocks show them, 16 images of 64 x 64 a step"
    return Task(title, lambda: _of(make), digit_batches(steps, size=16, pixels=64))


def _of(make: Callable[[], nn.Module]) -> tuple[nn.Module, Step]:
    """The network, each time with the same parameters, and the step that ends in its loss."""
    torch.manual_seed(0)
    module = make()
    return module, step_of(module)
