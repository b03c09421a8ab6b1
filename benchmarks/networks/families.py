"""Families of networks, one small member each, with a step that ends in its loss: what `docs/supported.md` tells of.

Their names are those of the table there; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks import hugging_face
from benchmarks.networks.batches import classifier, language_model, tokens
from benchmarks.networks.convolutional import FCN, Inception, efficientnet, mobilenet_v3
from benchmarks.networks.full_size import DenseNet, SegNet
from benchmarks.networks.mobilenet import MobileNetV2
from benchmarks.networks.patches import Mixer, Swin
from benchmarks.networks.recurrent import CellLSTM, HandWrittenLSTM, LibraryLSTM, TreeLSTM
from benchmarks.networks.resnet import resnet18
from benchmarks.networks.unet import UNet
from benchmarks.networks.vgg import VGG
from benchmarks.networks.vit import ViT

CLASSES, VOCABULARY = 10, 50
Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]


Family = Callable[[], Made]


def _images(build: Callable[[], nn.Module], size: int = 16, *, pixels: bool = False) -> Family:
    """A class for each image, or for each of its pixels."""

    def make() -> Made:
        module = build()
        target = torch.randint(CLASSES, (4, size, size) if pixels else (4,))

        def step(x: Tensor, target: Tensor) -> Tensor:
            scores = module(x)
            if isinstance(scores, tuple):  # of two classifiers
                return F.cross_entropy(scores[0], target) + 0.4 * F.cross_entropy(scores[1], target)
            return F.cross_entropy(scores, target)

        return module, step, (torch.randn(4, 3, size, size), target)

    return make


def _tokens(build: Callable[[], nn.Module]) -> Family:
    """The next token for each token."""

    def make() -> Made:
        module = build()
        return module, language_model(module), tokens(4, 5, VOCABULARY)

    return make


def _tree() -> Made:
    module = TreeLSTM(VOCABULARY, 16, CLASSES, tree=(((0, 1), 2), (3, 4)))
    return module, classifier(module), (torch.randint(VOCABULARY, (16, 5)), torch.randint(CLASSES, (16,)))


def _transformers(build: hugging_face.Build) -> Made:
    module, batch = build()
    names = list(batch)

    def step(*tensors: Tensor) -> Tensor:
        return module(**dict(zip(names, tensors, strict=True))).loss

    return module, step, tuple(batch.values())


FAMILIES: dict[str, Family] = {
    "VGG": _images(lambda: VGG(((8, 1), (16, 2)), CLASSES)),
    "ResNet": _images(lambda: resnet18(CLASSES, base=8)),
    "DenseNet": _images(lambda: DenseNet(CLASSES, growth=8, blocks=(3, 3))),
    "MobileNetV2": _images(lambda: MobileNetV2(CLASSES, table=((1, 8, 1, 1), (6, 12, 2, 2)))),
    "MobileNetV3": _images(lambda: mobilenet_v3(CLASSES)),
    "EfficientNet": _images(lambda: efficientnet(CLASSES)),
    "Inception": _images(lambda: Inception(CLASSES)),
    "U-Net": _images(lambda: UNet(CLASSES, depth=2, base=8), pixels=True),
    "FCN": _images(lambda: FCN(CLASSES), pixels=True),
    "SegNet": _images(lambda: SegNet(CLASSES, widths=(12, 24), depths=(1, 1)), pixels=True),
    "MLP-Mixer": _images(lambda: Mixer(16, 4, width=16, layers=1, classes=CLASSES)),
    "ViT": _images(lambda: ViT(16, 4, width=16, layers=1, heads=2, classes=CLASSES)),
    "Swin": _images(lambda: Swin(16, 2, width=16, heads=2, classes=CLASSES)),
    "LSTM, a loop in Python": _tokens(lambda: HandWrittenLSTM(VOCABULARY, 16)),
    "nn.LSTMCell": _tokens(lambda: CellLSTM(VOCABULARY, 16)),
    "nn.LSTM": _tokens(lambda: LibraryLSTM(VOCABULARY, 16, num_layers=2, dropout=0.2)),
    "nn.GRU": _tokens(lambda: LibraryLSTM(VOCABULARY, 16, nn.GRU, num_layers=2, dropout=0.2)),
    "nn.RNN": _tokens(lambda: LibraryLSTM(VOCABULARY, 16, nn.RNN, num_layers=2, dropout=0.2)),
    "TreeLSTM": _tree,
    **{name: partial(_transformers, build) for name, build in hugging_face.BUILDS.items()},
}
