"""Losses in parts: the smallest budgets of language models before and after, estimated for an H100.

    python -m benchmarks.splits [NETWORK ...] [--time-limit 10]

Networks are traced on the meta device as in `benchmarks.graphs`: nothing runs, so that no split has been tried. T5
needs ``--time-limit 75``. `benchmarks.loss` trains a loss in parts, and compares bits and peak with plain PyTorch.
Rows with "numerics" are of version 0.3.0, which ran other ops in parts too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import checkmate
from benchmarks import graphs
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.solvers.search.min_budget import ends_of
from checkmate.units import format_bytes


def _llama() -> nn.Module:
    """As TinyLlama is, with a vocabulary of 32,000."""
    config = LlamaConfig(hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, intermediate_size=5632)
    config.use_cache = False
    return LlamaForCausalLM(config)


NETWORKS: dict[str, graphs.Make] = {
    **{name: graphs.GRAPHS[name] for name in ("gpt2-12", "bert-base", "t5-base")},
    "llama-4": graphs._text(_llama),
}
HEADER = ("network", "keep all", "smallest", "in parts", "less", "step")
HEADER_BYTES = ("keep_all", "before", "after")


def smallest(name: str, time_limit: float) -> Iterator[Row]:
    """The smallest budget of a network before and after its loss is split."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("meta"):
        step, batch = NETWORKS[name]()
    whole = checkmate.trace(step, *batch, profile=f"roofline:{graphs.DEVICE}")
    ends = [(problem, ends_of(problem, time_limit=time_limit)) for problem in whole.splits_in_turn()]
    split, after = min(ends, key=lambda end: end[1].peak)
    yield {
        "network": name,
        "measured": False,
        "keep_all": whole.keep_all_peak,
        "resident": whole.resident,
        "before": ends[0][1].peak,
        "after": after.peak,
        "after_bound": after.bound,
        "splits": list(split.splits),
        "seconds": whole.keep_all_cost,
        "split_seconds": split.keep_all_cost,
    }


def _cells(row: Row) -> list[str]:
    gain, longer = 1 - row["after"] / row["before"], row["split_seconds"] / row["seconds"] - 1
    return [row["network"], *(format_bytes(row[key]) for key in HEADER_BYTES), f"{gain:.1%}", f"{longer:.1%}"]


BENCHMARK = Benchmark(
    __doc__,
    "splits.jsonl",
    smallest,
    HEADER,
    _cells,
    names=NETWORKS,
    options={"time_limit": (10.0, "seconds for each smallest budget")},
    quick={"time_limit": 1.0},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
