"""Ops in parts: the smallest budgets of networks before and after, estimated, and of small ones, measured here.

    python -m benchmarks.splits [NETWORK ...] [--numerics rounding] [--quick] [--out benchmarks/results/splits.jsonl]

With `--numerics rounding` sums over parts are taken too, where nothing else gains.
Networks at the size people train are traced on the meta device as in `benchmarks.graphs`: nothing runs, so that no
split has been tried. The small ones train on the CPU of this machine: each split was tried, and at the smallest budget
bits and peak are compared with those of plain PyTorch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks import graphs
from benchmarks.common.rows import Row, add_names, append, origin
from benchmarks.loss import NETWORKS as LANGUAGE
from benchmarks.networks.mobilenet import MobileNetV2
from benchmarks.networks.unet import UNet
from checkmate.backends.planner import Numerics
from checkmate.core.table import Table
from checkmate.profiling.profilers import Choice
from checkmate.solvers.search.min_budget import ends_of
from checkmate.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "splits.jsonl"
ESTIMATED: dict[str, graphs.Make] = {
    **{name: graphs.GRAPHS[name] for name in ("vgg16", "unet", "mobilenetv2", "vit-b16")},
    **LANGUAGE,
}
TIME_LIMIT = 10.0  # seconds, for each smallest budget
HEADER = ("network", "keep all", "smallest", "in parts", "less", "step")


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
    def make() -> tuple[graphs.Step, tuple[Tensor, ...]]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x), y)

        like = model(torch.zeros(shape))
        return step, (torch.randn(shape), torch.zeros(len(like), *like.shape[2:], dtype=torch.long))

    return make


def _attention() -> tuple[graphs.Step, tuple[Tensor, ...]]:
    return Attention(32, 4), (torch.randn(8, 256, 32), torch.randn(8, 256, 32))


MEASURED: dict[str, graphs.Make] = {
    "attention": _attention,
    "mobilenetv2-small": lambda: _images(MobileNetV2(10), 8, 3, 64, 64)(),
    "unet-small": lambda: _images(UNet(2, depth=2, base=8), 4, 3, 64, 64)(),
}


def smallest(name: str, numerics: Numerics, quick: bool) -> Row:
    """The smallest budget of a network before and after it is split."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    measured = name in MEASURED
    with torch.device("cpu" if measured else "meta"):
        step, batch = (MEASURED if measured else ESTIMATED)[name]()
    profile: Choice = "measure" if measured else f"roofline:{graphs.DEVICE}"
    whole = checkmate.trace(step, *batch, profile=profile, numerics=numerics)
    limit = 1.0 if quick else TIME_LIMIT
    ends = [(problem, ends_of(problem, time_limit=limit)) for problem in whole.and_smaller()]
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
        report = checkmate.verify(step, *batch, budget=after.peak, time_limit=limit, numerics=numerics)
        row |= {"same_bits": report.off == 0, "off": report.off, "measured_peak": report.measured_peak}
    return row


def main() -> None:
    """Find the smallest budgets that were asked for, and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_names(parser, [*MEASURED, *ESTIMATED])
    parser.add_argument("--numerics", choices=get_args(Numerics), default="exact")
    parser.add_argument("--quick", action="store_true", help="a second for each budget")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    shown = []
    for name in asked.names:
        row = smallest(name, asked.numerics, asked.quick)
        append(asked.out, {**origin("torch", "transformers"), **row})
        gain, longer = 1 - row["after"] / row["before"], row["split_seconds"] / row["seconds"] - 1
        bytes_of = (format_bytes(row[key]) for key in ("keep_all", "before", "after"))
        shown.append([name, *bytes_of, f"{gain:.1%}", f"{longer:.1%}"])
    print(Table(HEADER, shown, HEADER[1:]))


if __name__ == "__main__":
    main()
