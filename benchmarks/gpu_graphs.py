"""Training steps at the sizes people train, with the ops that a GPU runs: what they take, and what budgets they have.

    python -m benchmarks.gpu_graphs [NETWORK ...] [--kind float32 bfloat16] [--device h100]

The networks of `benchmarks.graphs` on the meta device, traced as PyTorch dispatches on CUDA for this device: attention
in one kernel, batch norm by cuDNN, dropout by its own generator; in float32, and in bfloat16 by autocast. No GPU runs
anything. Costs and bytes are estimates, whose error `benchmarks/results/estimates.md` tells. Smallest budgets are with
the loss at once, and in parts, whose bits the device would have to try. A T5 in bfloat16 is refused, as plain PyTorch
refuses it on an H100: attention by cuDNN has no gradient for a bias.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.graphs import DEVICE, GRAPHS
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported
from checkmate.solvers.search.min_budget import ends_of

KINDS = ("float32", "bfloat16")


def traced(name: str, kind: str = "float32", device: str = DEVICE) -> Problem:
    """Trace one network in one type, with the ops that the device runs and estimates of their costs."""
    torch._dynamo.reset()
    with torch.device("meta"):
        step, batch = GRAPHS[name]()

    def typed(*batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "bfloat16"):
            loss: Tensor = step(*batch)
            return loss

    return checkmate.trace(typed, *batch, profile=f"roofline:{device}")


def as_on_gpu(name: str, kind: str, device: str, time_limit: float) -> Iterator[Row]:
    """Trace one network in one type, and find its smallest budgets."""
    began = time.perf_counter()
    row: Row = {"network": name, "kind": kind, "device": device}
    try:
        whole = traced(name, kind, device)
    except Unsupported:
        yield {**row, "refused": True}
        return
    row |= {"traced_in": time.perf_counter() - began, "ops": len(whole.graph.ops)}
    row |= {"keep_all": whole.keep_all_peak, "resident": whole.resident}
    row |= {"seconds": whole.keep_all_cost, "source": whole.profile.source}
    least, parts = ends_of(whole, time_limit=time_limit), checkmate.min_budget(whole, time_limit=time_limit)
    row |= {"least": least.peak, "bound": least.bound, "least_in_parts": parts.peak, "time_limit": time_limit}
    half = checkmate.solve(whole, whole.keep_all_peak // 2, time_limit=time_limit, progress=False)
    row |= {"overhead_at_half": half.overhead, "gap_at_half": half.gap}
    yield row


BENCHMARK = Benchmark(
    __doc__,
    "gpu_graphs.jsonl",
    as_on_gpu,
    {
        "network": "{network}",
        "type": "{kind}",
        "ops": "{ops}|refused",
        "keep all": "{keep_all:bytes}",
        "smallest": "{least:bytes}",
        "in parts": "{least_in_parts:bytes}",
        "step": "{seconds:seconds}",
    },
    names=[*GRAPHS],
    options={
        "kind": (KINDS, "types: float32, or bfloat16 by autocast"),
        "device": (DEVICE, "whose ops and costs"),
        "time_limit": (10.0, "seconds for each smallest budget"),
    },
    quick={"time_limit": 1.0},
    packages=("torch", "transformers", "highspy"),
)

if __name__ == "__main__":
    BENCHMARK.run()
