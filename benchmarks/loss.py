"""The loss of a language model without its logits: smallest budgets, and steps beside other ways to do without them.

    python -m benchmarks.loss [NETWORK ...] [--rounds 5] [--quick]

For each network at the size people train, traced on the meta device as in `benchmarks.graphs`, a row with the smallest
budget of the step as it is, and with its loss in as many parts as help. The network ``head`` is trained here, on the
CPU: plainly, with chunks and `torch.utils.checkpoint` by hand, with PyTorch's own chunked
`torch.nn.functional.linear_cross_entropy`, and by checkmate, within the bytes of these and within the fewest. Steps
take turns; a row for each way has its peak as PyTorch's allocator counts it, parameters and batch included, the median
of its seconds, and what differs from plain PyTorch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import checkmate
from benchmarks import graphs
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import distance
from checkmate.backends.tensor_state import differing
from checkmate.memory import measure_peak
from checkmate.solvers.search.min_budget import ends_of
from checkmate.units import format_bytes, format_seconds

HEAD = "head"
CHUNKS = 8  # by hand
HEADER = ("network", "way", "budget", "peak", "step", "of plain", "numbers")
TIME_LIMIT = 20.0  # seconds, for each smallest budget and each plan


def _llama() -> nn.Module:
    """As TinyLlama is, with a vocabulary of 32,000."""
    config = LlamaConfig(hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, intermediate_size=5632)
    config.use_cache = False
    return LlamaForCausalLM(config)


NETWORKS: dict[str, graphs.Make] = {
    **{name: graphs.GRAPHS[name] for name in ("gpt2-12", "bert-base", "t5-base")},
    "llama-4": graphs._text(_llama),
}


def smallest(name: str, quick: bool) -> Row:
    """The smallest budget of a network, before and after its loss is split."""
    torch._dynamo.reset()
    with torch.device("meta"):
        step, batch = NETWORKS[name]()
    whole = checkmate.trace(step, *batch, profile=f"roofline:{graphs.DEVICE}")
    limit = 1.0 if quick else TIME_LIMIT
    *_, split = whole.and_smaller()
    before, after = ends_of(whole, time_limit=limit), ends_of(split, time_limit=limit)
    return {
        "network": name,
        "keep_all": whole.keep_all_peak,
        "resident": whole.resident,
        "before": before.peak,
        "before_bound": before.bound,
        "after": after.peak,
        "after_bound": after.bound,
        "splits": list(split.splits),
        "seconds": whole.keep_all_cost,
        "split_seconds": split.keep_all_cost,
    }


class Head(nn.Module):
    """Some layers, and the layer that makes logits."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(depth, depth), nn.GELU())))
        self.last = nn.Linear(depth, classes, bias=False)

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss as one writes it."""
        return F.cross_entropy(self.last(self.inner(x)), y)

    def by_hand(self, x: Tensor, y: Tensor) -> Tensor:
        """The rows in chunks, each checkpointed."""

        def part(h: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.last(h), y, reduction="sum")

        pairs = zip(self.inner(x).chunk(CHUNKS), y.chunk(CHUNKS), strict=True)
        return torch.stack([checkpoint(part, h, some, use_reentrant=False) for h, some in pairs]).sum() / len(y)

    def of_pytorch(self, x: Tensor, y: Tensor) -> Tensor:
        """The function that PyTorch has for it, since 2.13."""
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(self.inner(x), self.last.weight, y, options=options)


def ways(rounds: int, quick: bool) -> list[Row]:
    """A row for each way to train the head."""
    torch.manual_seed(0)
    rows, depth, classes = (128, 32, 2000) if quick else (1024, 256, 16_000)
    model = Head(depth, classes)
    x, y = torch.randn(rows, depth), torch.randint(classes, (rows,))
    resident = sum(t.nbytes for t in (*model.parameters(), x, y))
    steps: dict[str, Any] = {
        "plain": model.plain,
        f"checkpoint, {CHUNKS} chunks": model.by_hand,
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        steps["linear_cross_entropy"] = model.of_pytorch
    found = {way: _measured(model, step, x, y, resident) for way, step in steps.items()}
    problem = checkmate.trace(model.plain, x, y)
    budgets = {way: row["peak"] for way, row in found.items() if way != "plain"}
    for way, budget in {**budgets, "the fewest": checkmate.min_budget(problem).peak}.items():
        step = checkmate.compile(model.plain, budget=budget, time_limit=TIME_LIMIT)
        name = f"checkmate, bytes of {way}" if way in found else "checkmate, the fewest bytes"
        try:
            found[name] = _measured(model, step, x, y, resident)
        except checkmate.InfeasibleBudget as error:
            print(f"{name}: {error}")
            continue
        steps[name] = step
        found[name] |= {"budget": budget, "splits": list(step.plans[0].problem.splits), "planned": step.plans[0].peak}
    plain = _trained(model, model.plain, x, y)
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for way, step in steps.items():
        results = _trained(model, step, x, y)
        found[way] |= {"same_bits": not differing(results, plain), "difference": distance(results, plain)}
    for _ in range(rounds):
        for way, step in steps.items():
            began = time.perf_counter()
            step(x, y).backward()
            seconds[way].append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
    for way, row in found.items():
        row |= {"network": HEAD, "way": way, "rounds": rounds, "seconds": statistics.median(seconds[way])}
        row["ratio"] = statistics.median(a / b for a, b in zip(seconds[way], seconds["plain"], strict=True))
        row |= {"rows": rows, "depth": depth, "classes": classes, "threads": torch.get_num_threads()}
    return [*found.values()]


def _measured(model: nn.Module, step: Callable[..., Tensor], x: Tensor, y: Tensor, resident: int) -> Row:
    """The peak of a second step."""
    step(x, y).backward()
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: step(x, y).backward()).peak
    model.zero_grad(set_to_none=True)
    return {"peak": resident + peak}


def _trained(model: nn.Module, step: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    loss = step(x, y)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *grads]


def rows(name: str, rounds: int, small: bool) -> list[Row]:
    """The ways to train the head, or the smallest budgets of a network."""
    return ways(rounds, small) if name == HEAD else [smallest(name, small)]


def _shown(row: Row) -> list[str]:
    if row["network"] != HEAD:
        less = 1 - row["after"] / row["before"]
        way = f"smallest budget {format_bytes(row['before'])}, then {format_bytes(row['after'])}, {less:.1%} less"
        return [row["network"], way, "", "", "", "", ""]
    budget = format_bytes(row["budget"]) if "budget" in row else ""
    numbers = "same bits" if row["same_bits"] else f"differ by {row['difference']:.1e}"
    step = format_seconds(row["seconds"])
    return [HEAD, row["way"], budget, format_bytes(row["peak"]), step, f"{row['ratio']:.2f}", numbers]


BENCHMARK = Benchmark(
    __doc__,
    "loss.jsonl",
    rows,
    HEADER,
    _shown,
    names=[*NETWORKS, HEAD],
    options={"rounds": (5, "of timed steps"), "small": (False, "small, and with little time to search")},
    quick={"small": True},
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    BENCHMARK.run()
