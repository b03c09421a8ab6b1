"""Families of networks, one small member each, with a step that ends in its loss: what `docs/supported.md` tells of.

Their names are those of the table there; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.census import text
from benchmarks.networks.batches import Made, classifier, language_model, tokens
from benchmarks.networks.convolutional import (
    VGG,
    DenseNet,
    Inception,
    MobileNetV2,
    efficientnet,
    mobilenet_v3,
    resnet18,
)
from benchmarks.networks.linear import Mixer, ViT
from benchmarks.networks.pixels import FCN, SegNet, UNet
from benchmarks.networks.recurrent import LSTM, HandWrittenLSTM, LibraryLSTM, TreeLSTM

CLASSES, VOCABULARY = 10, 50
Family = Callable[[], Made]
SEEING: dict[str, Any] = {  # a small transformer of images
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
ONE_LABEL = "single_label_classification"  # else the first call finds it out, writes it down, and is captured again
LISTED = {  # of the census
    "GPT-2": "GPT2LMHeadModel",
    **{name: f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Mamba")},
    "BERT": "BertForMaskedLM",
    "RoBERTa": "RobertaForMaskedLM",
    "DistilBERT": "DistilBertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
    "BART": "BartForConditionalGeneration",
}
PADDED = ("BERT", "RoBERTa", "DistilBERT", "T5", "BART")


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


def _named(module: nn.Module, batch: dict[str, Tensor], **options: Any) -> Made:
    """A model of transformers, which gives its loss, on tensors by their names."""

    def step(*tensors: Tensor) -> Tensor:
        return module(**dict(zip(batch, tensors, strict=True)), **options).loss

    return module, step, tuple(batch.values())


def _padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a mask: each sequence ends a little earlier than the one before."""
    rows, length = batch["input_ids"].shape
    mask = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
    return {**batch, "input_ids": batch["input_ids"] * mask, "attention_mask": mask}


def _listed(name: str) -> Made:
    module, _, batch = text.make(LISTED[name])
    return _named(module, _padded(batch) if name in PADDED else batch)


def _of_images(name: str, **config: Any) -> Made:
    config_class, model_class = (getattr(transformers, name + part) for part in ("Config", "ForImageClassification"))
    module = model_class(config_class(**config, num_labels=CLASSES, problem_type=ONE_LABEL)).train()
    return _named(module, {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(CLASSES, (4,))})


def _clip() -> Made:
    words = text.small(transformers.CLIPTextConfig())
    config = transformers.CLIPConfig(text_config=words.to_dict(), vision_config=SEEING, projection_dim=16)
    tokens = torch.randint(10, 40, (4, 8))
    tokens[:, 4] = words.eos_token_id  # each text ends somewhere
    module = transformers.CLIPModel(config)
    batch = {**_padded({"input_ids": tokens}), "pixel_values": torch.randn(4, 3, 16, 16)}
    return _named(module, batch, return_loss=True)


def _whisper() -> Made:
    default = transformers.WhisperConfig(suppress_tokens=None, begin_suppress_tokens=None, max_source_positions=8)
    module = transformers.WhisperForConditionalGeneration(text.small(default, num_mel_bins=8))
    batch = {"input_features": torch.randn(4, 8, 16), "labels": torch.randint(10, 40, (4, 4))}
    return _named(module.train(), batch)


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
    "Swin": partial(
        _of_images, "Swin", image_size=16, patch_size=2, embed_dim=16, depths=(2, 1), num_heads=(2, 2), window_size=2
    ),
    "LSTM, a loop in Python": _tokens(lambda: HandWrittenLSTM(VOCABULARY, 16)),
    "nn.LSTMCell": _tokens(lambda: LSTM(VOCABULARY, 16, segments=1)),
    "nn.LSTM": _tokens(lambda: LibraryLSTM(VOCABULARY, 16, num_layers=2, dropout=0.2)),
    "nn.GRU": _tokens(lambda: LibraryLSTM(VOCABULARY, 16, nn.GRU, num_layers=2, dropout=0.2)),
    "nn.RNN": _tokens(lambda: LibraryLSTM(VOCABULARY, 16, nn.RNN, num_layers=2, dropout=0.2)),
    "TreeLSTM": _tree,
    **{name: partial(_listed, name) for name in LISTED},
    "ViT (transformers)": partial(_of_images, "ViT", **SEEING),
    "CLIP": _clip,
    "Whisper": _whisper,
}
