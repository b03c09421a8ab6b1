"""The networks of the comparison with other ways to save memory, and what each way needs to know of them.

`torch.utils.checkpoint` takes the blocks, `checkpoint_sequential` a chain of layers; both are named here, by hand, as
a person who uses them has to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks.batches import Batch, Step, classifier, images, language_model, tokens
from benchmarks.networks.convolutional import VGG16, MobileNetV2, resnet18, resnet50
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.linear import ViT
from benchmarks.networks.pixels import UNet
from benchmarks.networks.recurrent import LSTM

CLASSES = 1000


@dataclass(frozen=True)
class Network:
    """A network to train. ``make()`` is the same each time, after the same seed.

    ``blocks(module)``: the parts that checkpoints go around. ``chain(module)``: one `nn.Sequential` whose layers can be
    cut into segments, where there is one.
    """

    name: str
    make: Callable[[], tuple[Any, Batch]]
    blocks: Callable[[Any], list[nn.Module]]
    chain: Callable[[Any], list[nn.Sequential]] = lambda module: []
    loss: Callable[[Any], Step] = classifier


@dataclass(frozen=True)
class Subject:
    """A network with its parameters and its batch, which all ways to train it share."""

    network: Network
    module: nn.Module
    batch: Batch
    state: dict[str, Tensor] = field(repr=False)  # as it was made: buffers change with every step

    @classmethod
    def of(cls, network: Network, device: torch.device) -> Subject:
        """Make the network and its batch on a device, the same each time."""
        torch.manual_seed(0)
        with device:
            module, batch = network.make()
        state = {name: tensor.to("cpu", copy=True) for name, tensor in module.state_dict().items()}
        return cls(network, module, batch, state)

    @property
    def plain(self) -> Step:
        """The step as it is written."""
        return self.network.loss(self.module)

    def twin(self) -> nn.Module:
        """Another module of the same parameters and buffers, to be changed at will."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})

    def restore(self) -> None:
        """Parameters and buffers as they were made, no gradients."""
        self.module.load_state_dict(self.state)
        self.module.zero_grad(set_to_none=True)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad)


class SmallVGG16(VGG16):
    """VGG-16 for images of 96 x 96: the classifier reads what five poolings leave of them; blocks end at a pool."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.classifier[0] = nn.Linear(512 * 3 * 3, 4096)
        stages: list[list[nn.Module]] = [[]]
        for layer in self.features:
            stages[-1].append(layer)
            if isinstance(layer, nn.MaxPool2d):
                stages.append([])
        self.features = nn.Sequential(*(nn.Sequential(*stage) for stage in stages if stage))


def _chained(name: str, make: Callable[[], tuple[Any, Batch]], part: str) -> Network:
    """A network whose blocks are a chain, by the name of that part."""
    return Network(
        name, make, blocks=lambda module: list(getattr(module, part)), chain=lambda module: [getattr(module, part)]
    )


_ALL = (
    _chained("resnet18", lambda: (resnet18(CLASSES), images(8, 96, CLASSES)), "stages"),
    _chained("resnet50", lambda: (resnet50(CLASSES), images(8, 96, CLASSES)), "stages"),
    _chained("vgg16", lambda: (SmallVGG16(CLASSES), images(4, 96, CLASSES)), "features"),
    _chained("mobilenetv2", lambda: (MobileNetV2(CLASSES), images(8, 96, CLASSES)), "features"),
    Network(
        "unet",
        lambda: (UNet(20, depth=4, base=32), images(4, 96, 20, pixels=True)),
        blocks=lambda module: [*module.down, *module.up],
    ),
    Network(
        "gpt2",
        lambda: (GPT2(2048, 256, width=256, layers=4, heads=4, attention="sdpa"), tokens(4, 256, 2048)),
        blocks=lambda module: list(module.transformer.transformer.h),
        loss=language_model,
    ),
    _chained("vit", lambda: (ViT(96, 8, 192, layers=12, heads=3, classes=CLASSES), images(8, 96, CLASSES)), "blocks"),
    Network(
        "lstm",
        lambda: (LSTM(1024, width=256, segments=8), tokens(32, 32, 1024)),
        blocks=lambda module: [segment for layer in module.layers for segment in layer],
        loss=language_model,
    ),
)
NETWORKS = {network.name: network for network in _ALL}


def networks_at(where: str) -> dict[str, Network]:
    """A dict of networks by name, as another process finds it: ``module:name``."""
    module, name = where.split(":")
    found: dict[str, Network] = getattr(import_module(module), name)
    return found


def on_a_gpu(*, small: bool) -> dict[str, Network]:
    """Networks at sizes that fill a GPU of 80 GB, trained plainly; ``small`` for a test on the CPU."""
    if small:
        makes: dict[str, Callable[[], tuple[Any, Batch]]] = {
            "gpt2": lambda: (GPT2(64, 32, width=32, layers=2, heads=2, attention="sdpa"), tokens(2, 32, 64)),
            "resnet50": lambda: (resnet18(CLASSES, base=4), images(2, 32, CLASSES)),
            "unet": lambda: (UNet(4, depth=2, base=4), images(2, 32, 4, pixels=True)),
        }
    else:
        makes = {
            "gpt2": lambda: (GPT2(50257, 1024, 1024, layers=24, heads=16, attention="sdpa"), tokens(16, 1024, 50257)),
            "resnet50": lambda: (resnet50(CLASSES), images(256, 224, CLASSES)),
            "unet": lambda: (UNet(20, depth=4, base=64), images(32, 384, 20, pixels=True)),
        }
    names = {"gpt2": "gpt2-medium", "resnet50": "resnet50-256", "unet": "unet-32"}
    return {called: replace(NETWORKS[name], name=called, make=makes[name]) for name, called in names.items()}
