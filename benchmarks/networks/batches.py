"""Batches drawn at random, and the steps that train on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[..., Tensor]
Batch = tuple[Tensor, ...]
Made = tuple[nn.Module, Step, Batch]


def images(batch: int, size: int, classes: int, *, pixels: bool = False) -> Batch:
    """Images, and a class for each, or for each of its pixels."""
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch, size, size) if pixels else (batch,))


def tokens(batch: int, length: int, vocabulary: int) -> Batch:
    """So many tokens to predict, and one before them."""
    return (torch.randint(vocabulary, (batch, length + 1)),)


def classifier(module: nn.Module) -> Step:
    """The module and, inside the step, its cross entropy: classes are dimension 1 of the output."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(module(x), target)

    return step


def language_model(module: nn.Module) -> Step:
    """The step of a module from tokens to logits: each token is predicted from those before it."""

    def step(tokens: Tensor) -> Tensor:
        logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return step
