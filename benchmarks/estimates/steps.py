"""Training steps that others measured, as networks of ours: who measured what, and in which milliseconds.

Sources, none of them copied but for the figures here:

- timm: ``results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv`` of huggingface/pytorch-image-models
  (Apache-2.0): PyTorch 1.12, float16 by autocast, SGD, attention as three products. Left out is its VGG-13, which takes
  longer than VGG-19 there: 512 images leave cuDNN no room for its faster algorithms.
- MPT: ``scripts/train/benchmarking/README.md`` of mosaicml/llm-foundry (Apache-2.0): tokens a second of each of 8 or 16
  GPUs, bfloat16, sharded by FSDP. Here they are GPT-2 of transformers of the same width, heads, layers and vocabulary
  with exact GELU, no dropout and causal attention in one kernel, alone on a GPU: no communication.
- NVIDIA: ``PyTorch/Classification/ConvNets/resnet50v1.5/README.md`` of NVIDIA/DeepLearningExamples, one GPU;
  batch sizes and channels last are those of its ``configs.yml``.
- nanoGPT: README of karpathy/nanoGPT (MIT), "efficiency notes": about 250 ms without `torch.compile`, batch and length
  as in its ``bench.py``; its attention was three products then, and its GELU several ops.
- NeuSight: ``gpt2_large-train-1024-{1,4}.json`` of sitar-lab/NeuSight (MIT): float32, attention as three products,
  with dropout. Its A100 is the PCIe card, which may use less power.

Networks of ours are those of the papers, as timm's are but for details such as the classifier's bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.networks.batches import Made
from benchmarks.networks.convolutional import VGG16, BasicBlock, Bottleneck, DenseNet, MobileNetV2, ResNet
from benchmarks.networks.linear import ViT

CLASSES = 1000


@dataclass(frozen=True)
class Step:
    """A measured step."""

    device: str  # of `checkmate.profiling.data_sheets.DEVICES`
    source: str
    milliseconds: float
    make: Callable[[], Made]  # model, step and batch without data
    looked_at: bool  # while constants were set; the others were kept back


def _vit(width: int, layers: int, heads: int, patch_size: int = 16, image: int = 224) -> nn.Module:
    return ViT(image, patch_size, width, layers, heads, CLASSES, dropout=0.0, fused=False)


TIMM: dict[str, tuple[Callable[[], nn.Module], int, float, float | None]] = {  # images; ms, and with channels last
    "resnet18": (partial(ResNet, BasicBlock, (2, 2, 2, 2), CLASSES), 512, 184.877, 146.713),
    "resnet34": (partial(ResNet, BasicBlock, (3, 4, 6, 3), CLASSES), 512, 314.992, 250.813),
    "resnet50": (partial(ResNet, Bottleneck, (3, 4, 6, 3), CLASSES), 512, 618.983, 419.528),
    "resnet101": (partial(ResNet, Bottleneck, (3, 4, 23, 3), CLASSES), 256, 448.321, 340.74),
    "resnet152": (partial(ResNet, Bottleneck, (3, 8, 36, 3), CLASSES), 192, 516.516, 380.547),
    "vgg11": (partial(VGG16, CLASSES, (1, 1, 2, 2, 2)), 512, 619.706, 536.508),
    "vgg16": (partial(VGG16, CLASSES, (2, 2, 3, 3, 3)), 384, 824.954, 702.994),
    "vgg19": (partial(VGG16, CLASSES, (2, 2, 4, 4, 4)), 384, 1090.655, 839.347),
    "densenet121": (partial(DenseNet, CLASSES, blocks=(6, 12, 24, 16)), 256, 348.758, 278.353),
    "densenet169": (partial(DenseNet, CLASSES, blocks=(6, 12, 32, 32)), 256, 429.221, 337.551),
    "densenet201": (partial(DenseNet, CLASSES, blocks=(6, 12, 48, 32)), 192, 425.987, 338.221),
    "mobilenetv2": (partial(MobileNetV2, CLASSES), 512, 278.633, 220.563),
    "mobilenetv2-1.4": (partial(MobileNetV2, CLASSES, 1.4), 384, 302.189, 233.691),
    "vit-t16": (partial(_vit, 192, 12, 3), 512, 222.408, None),
    "vit-s16": (partial(_vit, 384, 12, 6), 384, 363.872, None),
    "vit-b16": (partial(_vit, 768, 12, 12), 192, 490.391, None),
    "vit-b32": (partial(_vit, 768, 12, 12, 32), 512, 299.695, None),
    "vit-l16": (partial(_vit, 1024, 24, 16), 64, 544.981, None),
    "vit-l32": (partial(_vit, 1024, 24, 16, 32), 256, 489.021, None),
    "vit-s16-384": (partial(_vit, 384, 12, 6, 16, 384), 64, 266.865, None),
    "vit-b16-384": (partial(_vit, 768, 12, 12, 16, 384), 32, 329.192, None),
    "vit-b32-384": (partial(_vit, 768, 12, 12, 32, 384), 256, 470.804, None),
}
MPT_SIZES = {  # width, heads, layers
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
}
MPT = {  # device, size, batch, length: tokens a second of each GPU
    ("h100", "760m", 96, 512): 83749,
    ("h100", "760m", 48, 1024): 78581,
    ("h100", "760m", 24, 2048): 68551,
    ("h100", "760m", 12, 4096): 55459,
    ("h100", "1b", 56, 512): 52275,
    ("h100", "1b", 18, 1024): 48910,
    ("h100", "1b", 14, 2048): 45455,
    ("h100", "1b", 20, 2048): 46037,
    ("a100", "125m", 128, 512): 165681,
    ("a100", "125m", 32, 2048): 141737,
    ("a100", "350m", 64, 1024): 64813,
    ("a100", "350m", 32, 2048): 58782,
    ("a100", "760m", 24, 2048): 32434,
    ("a100", "1b", 56, 512): 23148,
    ("a100", "1b", 14, 2048): 20513,
    ("a100", "1b", 7, 4096): 17807,
    ("a100", "3b", 10, 2048): 10811,
}
RESNET_50 = {  # device, precision: images, images a second
    ("a100", "float16"): (256, 2470),
    ("a100", "tf32"): (256, 938),
    ("v100", "float16"): (256, 1200),
    ("v100", "float32"): (112, 367),
}
NEUSIGHT = {  # device, batch: milliseconds
    ("h100", 1): 183.97714614868164,
    ("h100", 4): 638.8086059570312,
    ("a100", 1): 524.0467468261719,
    ("a100", 4): 1635.7427124023436,
}
KEPT_BACK = {  # whose estimates nobody looked at before the constants were what they are
    *(f"rtx3090 {name} channels last" for name in ("resnet152", "vgg11", "vgg16", "vgg19")),
    *(f"rtx3090 densenet{layers} channels last" for layers in (121, 169, 201)),
    *(f"rtx3090 mobilenetv2{wider} channels last" for wider in ("", "-1.4")),
    *(f"rtx3090 {name}" for name in ("vit-l32", "vit-s16-384", "vit-b32-384")),
    *(f"{device} resnet50 {precision}" for device, precision in RESNET_50),
    *(f"h100 mpt-1b {run}" for run in ("56 x 512", "18 x 1024", "14 x 2048", "20 x 2048")),
    *("a100 mpt-350m 64 x 1024", "a100 mpt-1b 7 x 4096", "a100 mpt-3b 10 x 2048", "a100 nanogpt"),
}


def _classifier(
    name: str, images: int, half: torch.dtype | None, image: int = 224, *, channels_last: bool = False
) -> Made:
    with torch.device("meta"):
        model = TIMM[name][0]()
        x, y = torch.empty(images, 3, image, image), torch.zeros(images, dtype=torch.long)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=half or torch.float16, enabled=half is not None):
            return F.cross_entropy(model(x), y)

    return model, step, (x, y)


def _language_model(
    size: tuple[int, int, int],
    batch: int,
    length: int,
    *,
    vocabulary: int,
    half: torch.dtype | None = None,
    dropout: float = 0.0,
    act: str = "gelu_new",
    attention: Literal["eager", "sdpa"] = "eager",
) -> Made:
    width, heads, layers = size
    sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": length, "vocab_size": vocabulary}
    dropped = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    kinds = {"activation_function": act, "attn_implementation": attention, "use_cache": False}
    config = GPT2Config(**sizes, **dropped, **kinds)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        tokens = torch.zeros(batch, length, dtype=torch.long)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=half or torch.bfloat16, enabled=half is not None):
            return model(input_ids=tokens, labels=tokens).loss

    return model, step, (tokens,)


def _all() -> dict[str, Step]:
    found: dict[str, Step] = {}

    def add(name: str, source: str, milliseconds: float, make: Callable[[], Made]) -> None:
        found[name] = Step(name.partition(" ")[0], source, milliseconds, make, name not in KEPT_BACK)

    make: Callable[..., Made]
    for name, (_, images, plain, last) in TIMM.items():
        make = partial(_classifier, name, images, torch.float16, 384 if name.endswith("-384") else 224)
        add(f"rtx3090 {name}", "timm", plain, make)
        if last is not None:
            add(f"rtx3090 {name} channels last", "timm", last, partial(make, channels_last=True))
    for (device, precision), (images, rate) in RESNET_50.items():
        is_half = precision == "float16"
        make = partial(_classifier, "resnet50", images, torch.float16 if is_half else None, channels_last=is_half)
        add(f"{device} resnet50 {precision}", "NVIDIA", 1000 * images / rate, make)
    half: Any = {"half": torch.bfloat16}
    for (device, size_name, batch, length), rate in MPT.items():
        sizes = MPT_SIZES[size_name], batch, length
        make = partial(_language_model, *sizes, vocabulary=50368, act="gelu", attention="sdpa", **half)
        add(f"{device} mpt-{size_name} {batch} x {length}", "MPT", 1000 * batch * length / rate, make)
    for (device, batch), milliseconds in NEUSIGHT.items():
        make = partial(_language_model, (1280, 20, 36), batch, 1024, vocabulary=50257, dropout=0.1)
        add(f"{device} gpt2-large {batch} x 1024", "NeuSight", milliseconds, make)
    add("a100 nanogpt", "nanoGPT", 250.0, partial(_language_model, (768, 12, 12), 12, 1024, vocabulary=50304, **half))
    return found


STEPS = _all()
