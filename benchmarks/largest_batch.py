"""The largest batch within 16 GB of six networks: of all methods together, of keeping everything, and of heuristics.

    python -m benchmarks.largest_batch [NETWORK ...] [--budget "16 GB"] [--device h100] [--time-limit 90]

As in Section 6.4 of Jain et al. (MLSys 2020) a step may take two forwards and a backward at the most. Nothing is
allocated: networks and batches are on the meta device. They are PyTorch's, in float32, their loss is within the step,
and costs are the roofline's for the device; the paper's are Keras's, cost is counted in FLOP, and all memory is in
proportion to the batch. Compare the ratios to keeping everything, not the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.networks.convolutional import VGG16, MobileNetV2, resnet50
from benchmarks.networks.pixels import FCN8, SegNet, UNet

BASELINES = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linearized-greedy")
PAPER = ("paper_size", "paper_ratio", "paper_source")  # the largest batch, and to that of keeping everything


@dataclass(frozen=True)
class Network:
    """A network to train, and the figures of the paper's text."""

    build: Callable[[], nn.Module]
    shape: tuple[int, int] = (224, 224)  # of an image
    pixels: bool = False  # whether each pixel has a class
    paper: tuple[int | None, float | None, str] = (None, None, "")  # by `PAPER`


NETWORKS = {
    "vgg19": Network(lambda: VGG16(1000, (2, 2, 4, 4, 4)), paper=(289, 289 / 167, "caption of Figure 7")),
    "mobilenetv2": Network(lambda: MobileNetV2(1000)),
    "resnet50": Network(lambda: resnet50(1000)),
    "unet": Network(lambda: UNet(2, depth=4, base=64), (416, 608), pixels=True, paper=(61, None, "Section 6.4")),
    "fcn8": Network(lambda: FCN8(21), (416, 608), pixels=True),
    "segnet": Network(lambda: SegNet(12), (416, 608), pixels=True),
}


def rows(name: str, budget: str, device: str, time_limit: float) -> Iterator[Row]:
    """The row of a network."""
    network = NETWORKS[name]

    def make_step() -> Callable[[Tensor, Tensor], Tensor]:
        with torch.device("meta"):
            model = network.build()
        return lambda x, target: F.cross_entropy(model(x), target)

    def make_batch(n: int) -> tuple[Tensor, Tensor]:
        places = network.shape if network.pixels else ()
        images = torch.empty(n, 3, *network.shape, device="meta")
        return images, torch.empty(n, *places, dtype=torch.long, device="meta")

    torch._dynamo.reset()
    costs: dict[str, Any] = {"profile": f"roofline:{device}", "time_limit": time_limit}
    found = checkmate.max_batch_size(make_step, make_batch, budget=budget, baselines=BASELINES, **costs)
    row: Row = {"device": device, "time_limit": time_limit, "network": name}
    row |= {"ops": len(found.solution.problem.graph.ops), **dict(zip(PAPER, network.paper, strict=True))}
    yield {**row, "ratio": None if found.keep_all is None else found.size / found.keep_all, **found.summary()}


def _paper(row: Row) -> str:
    size, ratio = row["paper_size"], row["paper_ratio"]
    return "-" if size is None else f"to {size}" if ratio is None else f"{ratio:.2f}x to {size}"


def _best_other(row: Row) -> str:
    others = {name: point["size"] for name, point in row["baselines"].items() if point is not None}
    best = max(others, key=lambda name: others[name], default=None)
    return "-" if best is None else f"{others[best]}{'+' if best in row['cut_short'] else ''} {best}"


BENCHMARK = Benchmark(
    __doc__,
    "largest_batch.jsonl",
    rows,
    {
        "network": "{network}",
        "ours": "{size}",
        "one more": "{next_size}",
        "keep all": "{keep_all}|-",
        "ratio": "{ratio:.2f}x|-",
        "paper": _paper,
        "best other": _best_other,
        "fastest": "{fastest[size]}: {fastest[throughput]:.0f}/s",
        "recomputed": lambda row: f"{row['points'][-1]['overhead']:.1%}",
        "found in": "{seconds:seconds}",
    },
    names=NETWORKS,
    options={
        "budget": ("16 GB", "of the device"),
        "device": ("h100", "whose roofline gives the costs"),
        "time_limit": (90.0, "seconds for each network"),
    },
)

if __name__ == "__main__":
    BENCHMARK.run()
