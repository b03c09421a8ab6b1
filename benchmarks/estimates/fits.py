"""Answers of `checkmate.fits` for networks of the size people train, and how long they take on one thread.

    python -m benchmarks.estimates.fits [NETWORK ...] [--device rtx4090 h100] [--time-limit 30]

A network has a row for the answer, and one with everything looked at. Nothing is allocated: networks and batches are on
the meta device. A step is forward, backward and AdamW's update in float32. Seconds are those on the clock, and of the
process, on a machine that may do other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import checkmate
from benchmarks.common.rows import Column, Row, cell
from benchmarks.common.runner import Benchmark
from benchmarks.networks.batches import Batch, Step, classifier
from benchmarks.networks.convolutional import resnet50
from checkmate.units import format_bytes


def _language(model: Any, rows: int, length: int) -> tuple[Step, Batch]:
    def loss_fn(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return loss_fn, (torch.zeros(rows, length, dtype=torch.long),)


def _resnet50() -> tuple[Step, Batch]:
    return classifier(resnet50(1000)), (torch.empty(256, 3, 224, 224), torch.empty(256, dtype=torch.long))


# Of 0.16 billion parameters.
LLAMA = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
NETWORKS: dict[str, Callable[[], tuple[Step, Batch]]] = {
    "gpt2-xl": lambda: _language(GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25)), 8, 512),
    "resnet50": _resnet50,
    "llama": lambda: _language(LlamaForCausalLM(LlamaConfig(**LLAMA)), 16, 1024),
}


def rows(name: str, device: str, time_limit: float) -> Iterator[Row]:
    """The rows of a network on a device."""
    with torch.device("meta"):
        loss_fn, batch = NETWORKS[name]()
    for everything in (False, True):
        began, spent = time.perf_counter(), time.process_time()
        page = checkmate.fits(loss_fn, *batch, device=device, everything=everything, time_limit=time_limit)
        clock, spent = time.perf_counter() - began, time.process_time() - spent
        about = {"network": name, "name": device, "everything": everything, "ops": len(page.problem.graph.ops)}
        yield {**about, "clock": clock, "process": spent, **page.summary()}


def _way(at: int) -> Column:
    return lambda row: "-" if row["ways"][at]["smallest"] is None else format_bytes(row["ways"][at]["smallest"])


def _best(form: Column) -> Column:
    """Of the way to train that is answered with."""

    def column(row: Row) -> str:
        plain: Row = {"name": "as it is", "overhead": None, "seconds": row["plain_seconds"]}
        way = plain if row["fits_plainly"] else next((way for way in row["ways"] if way["fits"]), {"name": "none"})
        return cell(way, form)

    return column


BENCHMARK = Benchmark(
    __doc__,
    "fits.jsonl",
    rows,
    {
        "network": "{network}",
        "device": "{name}",
        "asked": lambda row: "everything" if row["everything"] else "the answer",
        "plain": "{plain[peak]:bytes}",
        "room": "{room:bytes}",
        **{name: _way(at) for at, name in enumerate(("recomputation", "parts", "second memory"))},
        "way": _best("{name}"),
        "recomputed": _best("{overhead:.1%}|-"),
        "step": _best("{seconds:seconds}|-"),
        "largest batch": "{largest[plain]} / {largest[keep_all]} / {largest[planned]}|-",
        "answered in": "{clock:seconds}",
        "of the process": "{process:seconds}",
    },
    names=NETWORKS,
    options={
        "device": (("rtx4090", "h100"), "by its data sheet"),
        "time_limit": (30.0, "seconds that are asked for"),
    },
    packages=("torch", "transformers"),
    environment={"OMP_NUM_THREADS": "1"},
)

if __name__ == "__main__":
    BENCHMARK.run()
