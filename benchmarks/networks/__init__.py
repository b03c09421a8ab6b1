"""Small, honest networks to test with, each with a batch and a step that ends in its loss.

The sizes are such that the activations outweigh the parameters, and that a plain step takes well under half a second on
one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.mlp import MLP
from benchmarks.networks.mobilenet import MobileNetV2
from benchmarks.networks.resnet import resnet18, resnet50
from benchmarks.networks.unet import UNet
from benchmarks.networks.vgg import VGG
from benchmarks.networks.vit import ViT

Step = Callable[..., Tensor]
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network to train: ``make(seed)`` gives the module, the step ``step(*batch) -> loss``, and a batch."""

    name: str
    make: Callable[[int], tuple[nn.Module, Step, tuple[Tensor, ...]]]


def _step(module: nn.Module) -> Step:
    """The module and, inside the step, its cross entropy: classes are dimension 1 of the output."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(module(x), target)

    return step


def _classifier(name: str, build: Callable[[], nn.Module], *shape: int) -> Case:
    def make(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
        torch.manual_seed(seed)
        module = build()
        batch = torch.randn(shape), torch.randint(CLASSES, (shape[0],))
        return module, _step(module), batch

    return Case(name, make)


def _unet(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module = UNet(CLASSES, depth=3, base=16)
    batch = torch.randn(4, 3, 64, 64), torch.randint(CLASSES, (4, 64, 64))
    return module, _step(module), batch


def language_model(module: nn.Module) -> Step:
    """The step of a module from tokens to logits: each token is predicted from those before it."""

    def step(tokens: Tensor) -> Tensor:
        logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return step


def _gpt2(name: str, attention: Literal["eager", "sdpa"], layers: int) -> Case:
    def make(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
        from benchmarks.networks.gpt2 import GPT2  # its library takes ten seconds, which only this one needs

        torch.manual_seed(seed)
        module = GPT2(vocabulary=128, positions=64, width=64, layers=layers, heads=4, attention=attention)
        return module, language_model(module), (torch.randint(128, (8, 65)),)

    return Case(name, make)


_CASES = (
    _classifier("mlp", lambda: MLP(64, 128, layers=6, classes=CLASSES), 512, 64),
    _classifier("vgg", lambda: VGG(((16, 1), (32, 2), (64, 2)), CLASSES), 8, 3, 64, 64),
    _classifier("resnet18", lambda: resnet18(CLASSES, base=16), 32, 3, 64, 64),
    _classifier("resnet50", lambda: resnet50(CLASSES, base=16), 8, 3, 64, 64),
    Case("unet", _unet),
    _classifier("mobilenet", lambda: MobileNetV2(CLASSES, width=0.5), 8, 3, 64, 64),
    _classifier("vit", lambda: ViT(32, 4, width=64, layers=3, heads=4, classes=CLASSES), 16, 3, 32, 32),
    _gpt2("gpt2-eager", "eager", layers=2),
    _gpt2("gpt2-sdpa", "sdpa", layers=2),
    _gpt2("gpt2-4", "eager", layers=4),
)
CASES: dict[str, Case] = {case.name: case for case in _CASES}
