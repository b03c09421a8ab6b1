"""Ops in parts: the smallest budgets of networks before and after, estimated, and of small ones, measured here.

    python -m benchmarks.splits [NETWORK ...] [--numerics rounding] [--quick]

With `--numerics rounding` sums over parts are taken too, where nothing else gains.
Networks at the size people train are traced on the meta device as in `benchmarks.graphs`: nothing runs, so that no
split has been tried. The small ones train on the CPU of this machine: each split was tried, and at the smallest budget
bits and peak are compared with those of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import checkmate
from benchmarks import graphs
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.networks.batches import Batch, Step, classifier
from benchmarks.networks.mobilenet import MobileNetV2
from benchmarks.networks.unet import UNet
from checkmate.backends.planner import Numerics
from checkmate.profiling.profilers import Choice
from checkmate.solvers.search.min_budget import ends_of
from checkmate.units import format_bytes


def _llama() -> nn.Module:
    """As TinyLlama is, with a vocabulary of 32,000."""
    config = LlamaConfig(hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, intermediate_size=5632)
    config.use_cache = False
    return LlamaForCausalLM(config)


FROM_GRAPHS = ("vgg16", "unet", "mobilenetv2", "vit-b16", "gpt2-12", "bert-base", "t5-base")
ESTIMATED: dict[str, graphs.Make] = {
    **{name: graphs.GRAPHS[name] for name in FROM_GRAPHS},
    "llama-4": graphs._text(_llama),
}
HEADER = ("network", "keep all", "smallest", "in parts", "less", "step")
HEADER_BYTES = ("keep_all", "before", "after")


class Attention(nn.Module):
    """Attention by matmul, softmax, matmul, twice."""

    def __init__(self, depth: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.Linear(depth, 3 * depth) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        batch, length, depth = x.shape
        for layer in self.layers:
            made = layer(x).view(batch, length, 3, self.heads, depth // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = made.unbind()
            scores = F.dropout((q @ k.transpose(-1, -2) * depth**-0.5).softmax(-1), 0.1)
            x = x + (scores @ v).transpose(1, 2).reshape(x.shape)
        return F.mse_loss(x, target)


def _images(model: nn.Module, *shape: int) -> graphs.Make:
    def make() -> tuple[Step, Batch]:
        like = model(torch.zeros(shape))
        return classifier(model), (torch.randn(shape), torch.zeros(len(like), *like.shape[2:], dtype=torch.long))

    return make


def _attention() -> tuple[Step, Batch]:
    return Attention(32, 4), (torch.randn(8, 256, 32), torch.randn(8, 256, 32))


MEASURED: dict[str, graphs.Make] = {
    "attention": _attention,
    "mobilenetv2-small": lambda: _images(MobileNetV2(10), 8, 3, 64, 64)(),
    "unet-small": lambda: _images(UNet(2, depth=2, base=8), 4, 3, 64, 64)(),
}


def smallest(name: str, numerics: Numerics, time_limit: float) -> Iterator[Row]:
    """The smallest budget of a network before and after it is split."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    measured = name in MEASURED
    with torch.device("cpu" if measured else "meta"):
        step, batch = (MEASURED if measured else ESTIMATED)[name]()
    profile: Choice = "measure" if measured else f"roofline:{graphs.DEVICE}"
    whole = checkmate.trace(step, *batch, profile=profile, numerics=numerics)
    ends = [(problem, ends_of(problem, time_limit=time_limit)) for problem in whole.and_smaller()]
    before = ends[0][1]
    split, after = min(ends, key=lambda end: end[1].peak)
    row: Row = {
        "network": name,
        "numerics": numerics,
        "measured": measured,
        "keep_all": whole.keep_all_peak,
        "resident": whole.resident,
        "before": before.peak,
        "after": after.peak,
        "after_bound": after.bound,
        "splits": list(split.splits),
        "rounding": split.rounding,
        "seconds": whole.keep_all_cost,
        "split_seconds": split.keep_all_cost,
    }
    if measured:
        report = checkmate.verify(step, *batch, budget=after.peak, time_limit=time_limit, numerics=numerics)
        row |= {"same_bits": report.off == 0, "off": report.off, "measured_peak": report.measured_peak}
    yield row


def _cells(row: Row) -> list[str]:
    gain, longer = 1 - row["after"] / row["before"], row["split_seconds"] / row["seconds"] - 1
    return [row["network"], *(format_bytes(row[key]) for key in HEADER_BYTES), f"{gain:.1%}", f"{longer:.1%}"]


BENCHMARK = Benchmark(
    __doc__,
    "splits.jsonl",
    smallest,
    HEADER,
    _cells,
    names=[*MEASURED, *ESTIMATED],
    options={
        "numerics": (("exact",), 'what is taken: "exact" or "rounding"'),
        "time_limit": (10.0, "seconds for each smallest budget"),
    },
    quick={"time_limit": 1.0},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
