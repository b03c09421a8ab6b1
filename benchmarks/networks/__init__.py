"""Small, honest networks to test with, each with a batch and a step that ends in its loss.

The sizes are such that the activations outweigh the parameters, and that a plain step takes well under half a second on
one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.networks.batches import Batch, Step, classifier, images, language_model, tokens
from benchmarks.networks.convolutional import VGG, MobileNetV2, resnet18, resnet50
from benchmarks.networks.linear import MLP, ViT
from benchmarks.networks.pixels import UNet

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network to train: ``make(seed)`` gives the module, the step ``step(*batch) -> loss``, and a batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    step: Callable[[nn.Module], Step] = classifier

    def make(self, seed: int) -> tuple[nn.Module, Step, Batch]:
        """Module, step and batch, which a seed determines."""
        torch.manual_seed(seed)
        module = self.build()
        return module, self.step(module), self.batch()


def _numbers() -> Batch:
    return torch.randn(512, 64), torch.randint(CLASSES, (512,))


def _gpt2(**settings: Any) -> nn.Module:
    from benchmarks.networks.gpt2 import GPT2  # its library takes ten seconds, which only this one needs

    return GPT2(vocabulary=128, positions=64, width=64, heads=4, **settings)


_text = partial(tokens, 8, 64, 128)
_CASES = (
    Case("mlp", lambda: MLP(64, 128, layers=6, classes=CLASSES), _numbers),
    Case("vgg", lambda: VGG(((16, 1), (32, 2), (64, 2)), CLASSES), partial(images, 8, 64, CLASSES)),
    Case("resnet18", lambda: resnet18(CLASSES, base=16), partial(images, 32, 64, CLASSES)),
    Case("resnet50", lambda: resnet50(CLASSES, base=16), partial(images, 8, 64, CLASSES)),
    Case("unet", lambda: UNet(CLASSES, depth=3, base=16), partial(images, 4, 64, CLASSES, pixels=True)),
    Case("mobilenet", lambda: MobileNetV2(CLASSES, width=0.5), partial(images, 8, 64, CLASSES)),
    Case("vit", lambda: ViT(32, 4, width=64, layers=3, heads=4, classes=CLASSES), partial(images, 16, 32, CLASSES)),
    Case("gpt2-eager", lambda: _gpt2(layers=2, attention="eager"), _text, language_model),
    Case("gpt2-sdpa", lambda: _gpt2(layers=2, attention="sdpa"), _text, language_model),
    Case("gpt2-4", lambda: _gpt2(layers=4, attention="eager"), _text, language_model),
)
CASES: dict[str, Case] = {case.name: case for case in _CASES}
