"""Seconds and peaks of steps by PyTorch's kernels and by fused ones, beside torch.compile, on the CPU.

    python -m benchmarks.kernels [NETWORK ...] [--rounds 7] [--time-limit 10]

Ways are plain PyTorch, `torch.compile`, that with its activation memory budget, and ours with each value of
``kernels``: keeping everything, at half of what plain PyTorch takes, and within the measured peak of each way of
torch.compile. Steps take turns in one process and thread; a row for each has the peak as
PyTorch's allocator counts it, parameters and batch included, the median of its seconds in proportion to plain PyTorch's
next to it, the seconds of its first step, on an empty cache of Inductor's, and what differs from plain PyTorch.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import distance, median_ratio, seconds_in_turn, step_and_back
from benchmarks.networks.batches import Batch, Step, classifier, images, language_model, tokens
from benchmarks.networks.convolutional import MobileNetV2, resnet18
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.linear import ViT
from benchmarks.networks.llama import Llama
from checkmate.backends.tensor_state import differing
from checkmate.capture.fusion.kernels import Kernels
from checkmate.demo.training import peak_of_step

BUDGETS = (0.1, 0.3, 0.5)  # of activations, for torch.compile
HALF = 0.5  # of what plain PyTorch takes
WORDS, CLASSES = 1000, 10


def _llama() -> nn.Module:
    return Llama(length=256, layers=4, width=256, inner=704, heads=4, groups=4, words=WORDS)


def _gpt2() -> nn.Module:
    model = GPT2(vocabulary=WORDS, positions=256, width=256, layers=4, heads=4, attention="sdpa")
    return model.eval()  # torch.compile draws other numbers


def _words() -> Batch:
    (words,) = tokens(8, 256, WORDS)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _in_bfloat16(module: nn.Module) -> Step:
    def step(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = module(*batch)
        return loss

    return step


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[[nn.Module], Step]]] = {
    "llama": (_llama, _words, lambda module: module),
    "llama-bf16": (_llama, _words, _in_bfloat16),
    "gpt2": (_gpt2, partial(tokens, 8, 256, WORDS), language_model),
    "vit": (
        lambda: ViT(64, 8, width=192, layers=4, heads=3, classes=CLASSES),
        partial(images, 32, 64, CLASSES),
        classifier,
    ),
    "resnet18": (lambda: resnet18(CLASSES, base=16), partial(images, 32, 64, CLASSES), classifier),
    "mobilenet": (lambda: MobileNetV2(CLASSES, width=0.5), partial(images, 8, 64, CLASSES), classifier),
}


def rows(name: str, rounds: int, time_limit: float) -> Iterator[Row]:
    """A row for each way to train a network."""
    torch.set_num_threads(1)
    build, make_batch, step_of = NETWORKS[name]
    torch.manual_seed(0)
    model, batch = build(), make_batch()
    plain = step_of(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    resident = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), *batch})
    steps, found = dict[str, Step](), dict[str, Row]()

    def left_by(step: Step) -> list[Tensor]:
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = step(*batch)
        loss.backward()
        return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def add(way: str, step: Step, **about: Any) -> int:
        """Run a step for the first time, and meter it; the bytes that it takes."""
        began = time.perf_counter()
        try:
            results = left_by(step)
        except checkmate.InfeasibleBudget as refusal:
            found[way] = {"refused": str(refusal), **about}
            return 0
        seconds = time.perf_counter() - began
        plans = getattr(step, "plans", None)
        planned = {} if not plans else {"planned": plans[0].peak, "recomputed": plans[0].overhead}
        found[way] = {
            "first_step_seconds": seconds, "peak": resident + peak_of_step(model, step, batch), **planned, **about,
            "same_bits": not differing(results, expected), "difference": distance(results, expected),
        }  # fmt: skip
        steps[way] = step
        peak: int = found[way]["peak"]
        return peak

    expected = left_by(plain)
    whole = add("plain", plain)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        peaks = {"torch.compile": add("torch.compile", _anew(plain))}
        for share in BUDGETS:
            way = f"torch.compile, budget {share}"
            with functorch_config.patch(activation_memory_budget=share):
                peaks[way] = add(way, _anew(plain))
    for kernels in get_args(Kernels):
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
            budgets = {"keep all": 2 * whole, "half": int(HALF * whole), **peaks}
            for what, budget in budgets.items():
                options: dict[str, Any] = {
                    "kernels": kernels,
                    "wait": "best",
                    "verify": False,
                    "time_limit": time_limit,
                }
                add(f"{kernels}, {what}", checkmate.compile(plain, budget=budget, **options), budget=budget)
    seconds = seconds_in_turn({way: partial(step_and_back, model, step, batch) for way, step in steps.items()}, rounds)
    for way, row in found.items():
        if way in seconds:
            row["seconds"] = statistics.median(seconds[way])
            row["ratio"] = median_ratio(seconds[way], seconds["plain"])
        yield {"model": name, "way": way, "threads": 1, "rounds": rounds, "time_limit": time_limit, **row}


def _anew(step: Step) -> Step:
    """A step that torch.compile compiles by itself: Dynamo keeps what it compiles with the code, however it was set."""

    def again(*batch: Tensor) -> Tensor:
        return step(*batch)

    again.__code__ = again.__code__.replace()
    return torch.compile(again, dynamic=False)


BENCHMARK = Benchmark(
    __doc__,
    "kernels.jsonl",
    rows,
    {
        "network": "{model}",
        "way": "{way}",
        "peak": "{peak:bytes}",
        "of plain": "{ratio:.2f}",
        "first step": "{first_step_seconds:seconds}",
        "numbers": lambda row: "same bits" if row.get("same_bits") else f"differ by {row.get('difference', 0):.1e}",
    },
    names=NETWORKS,
    options={"rounds": (7, "of timed steps"), "time_limit": (10.0, "seconds for each plan")},
)

if __name__ == "__main__":
    BENCHMARK.run()
