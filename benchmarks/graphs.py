"""Training steps at the sizes people train, traced without running them, as one problem file each.

    python -m benchmarks.graphs [NETWORK ...] [--device h100] [--out benchmarks/problems]

Nothing is allocated: models and batches are fake tensors on the CPU. Ops are those that PyTorch runs there, in float32,
each as it has it and in its order: what rewrites of them are worth is another question (`benchmarks.ways`). Their costs
are the roofline's for the device, and sizes are as its allocator rounds them. The loss is within the step; optimizer
state is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import checkmate
from benchmarks.common.rows import add_names, documented
from benchmarks.networks.batches import Batch, Step, classifier, images
from benchmarks.networks.convolutional import VGG16, DenseNet, MobileNetV2, resnet18, resnet50
from benchmarks.networks.linear import ViT
from benchmarks.networks.pixels import UNet
from checkmate.backends import passes, step_problem
from checkmate.capture import rewrite
from checkmate.core.answer import Table
from checkmate.profiling.roofline import DEVICES
from checkmate.units import format_bytes, format_seconds

PROBLEMS = Path(__file__).parent / "problems"
DEVICE = "h100"
CLASSES = 1000
BATCH, LENGTH = 8, 512  # of text
HEADER = ("graph", "ops", "values", "resident", "keep all", "least op", "step", "file", "traced in")

Make = Callable[[], tuple[Step, Batch]]


def _images(build: Callable[[], nn.Module]) -> Make:
    """A classifier of images of 224 x 224."""
    return lambda: (classifier(build()), images(64, 224, CLASSES))


def _unet() -> tuple[Step, Batch]:
    return classifier(UNet(2, depth=4, base=64)), (torch.zeros(8, 3, 416, 608), _integers(8, 416, 608))


def _text(build: Callable[[], nn.Module]) -> Make:
    """A model of the transformers library, which takes tokens and labels and returns its loss."""

    def make() -> tuple[Step, Batch]:
        model = build().train()

        def step(tokens: Tensor, labels: Tensor) -> Tensor:
            return model(input_ids=tokens, labels=labels).loss

        return step, (_integers(BATCH, LENGTH), _integers(BATCH, LENGTH))

    return make


def _integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


T5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
GRAPHS: dict[str, Make] = {
    "vgg16": _images(lambda: VGG16(CLASSES)),
    "resnet18": _images(lambda: resnet18(CLASSES)),
    "resnet50": _images(lambda: resnet50(CLASSES)),
    "mobilenetv2": _images(lambda: MobileNetV2(CLASSES)),
    "densenet121": _images(lambda: DenseNet(CLASSES)),
    "unet": _unet,
    "vit-b16": _images(lambda: ViT(224, 16, width=768, layers=12, heads=12, classes=CLASSES)),
    "bert-base": _text(lambda: BertForMaskedLM(BertConfig())),
    "gpt2-12": _text(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False))),
    "gpt2-48": _text(lambda: GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25, use_cache=False))),
    "t5-base": _text(lambda: T5ForConditionalGeneration(T5Config(**T5, use_cache=False))),
}


def problem_of(name: str, device: str = DEVICE) -> checkmate.Problem:
    """Trace a graph by name."""
    torch._dynamo.reset()
    with FakeTensorMode():
        step, batch = GRAPHS[name]()
    return checkmate.trace(step, *batch, profile=f"roofline:{device}")


def plain_problem_of(name: str, device: str = DEVICE) -> checkmate.Problem:
    """Trace a graph as PyTorch has it: its ops, in its order, none of which writes over an input."""
    with (
        patch.object(rewrite, "split_convolutions", lambda *_: None),
        patch.object(passes, "forget_inputs", lambda _: None),
        patch.object(step_problem, "late_results", lambda graph, **options: None),
    ):
        problem = problem_of(name, device)
    return replace(problem, profile=replace(problem.profile, ways=()), next_split=None)


def main() -> None:
    """Trace what was asked for, write the files, and print what is in them."""
    parser = documented(__doc__)
    add_names(parser, GRAPHS)
    parser.add_argument("--device", default=DEVICE, choices=DEVICES)
    parser.add_argument("--out", type=Path, default=PROBLEMS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in args.names:
        began = time.perf_counter()
        problem = plain_problem_of(name, args.device)
        path = args.out / f"{name}.json.gz"
        problem.to_json(path)
        sizes = (problem.resident, problem.keep_all_peak, problem.unavoidable_bytes.max())
        cells = [name, str(len(problem.graph.ops)), str(len(problem.graph.values)), *map(format_bytes, sizes)]
        took = format_seconds(time.perf_counter() - began)
        lines.append([*cells, format_seconds(problem.keep_all_cost), format_bytes(path.stat().st_size), took])
    print(Table(HEADER, lines, HEADER[1:]))


if __name__ == "__main__":
    main()
