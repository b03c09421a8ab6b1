"""The loss of a language model without its logits, beside other ways to do without them.

    python -m benchmarks.loss [--rounds 5] [--quick]

A layer that makes logits, behind two others, is trained here, on the CPU: plainly, with chunks and
`torch.utils.checkpoint` by hand, with PyTorch's own chunked `torch.nn.functional.linear_cross_entropy`, and by
checkmate, within the bytes of these and within the fewest. Steps take turns; a row for each way has its peak as
PyTorch's allocator counts it, parameters and batch included, the median of its seconds, and what differs from plain
PyTorch. What is gained on language models at the size people train `benchmarks.gpu_graphs` says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import distance, median_ratio, seconds_in_turn, step_and_back
from checkmate.backends.tensor_state import differing
from checkmate.demo.training import peak_of_step
from checkmate.errors import InfeasibleBudget

CHUNKS = 8  # by hand
TIME_LIMIT = 20.0  # seconds for each plan


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


def ways(rounds: int, small: bool) -> list[Row]:
    """A row for each way to train the head."""

    def trained(step: Callable[..., Tensor]) -> list[Tensor]:
        loss = step(x, y)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return [loss.detach(), *grads]

    torch.manual_seed(0)
    rows, depth, classes = (128, 32, 2000) if small else (1024, 256, 16_000)
    model = Head(depth, classes)
    x, y = torch.randn(rows, depth), torch.randint(classes, (rows,))
    resident = sum(t.nbytes for t in (*model.parameters(), x, y))
    steps: dict[str, Any] = {"plain": model.plain, f"checkpoint, {CHUNKS} chunks": model.by_hand}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        steps["linear_cross_entropy"] = model.of_pytorch
    found: dict[str, Row] = {way: {"peak": resident + peak_of_step(model, step, (x, y))} for way, step in steps.items()}
    problem = checkmate.trace(model.plain, x, y)
    budgets = {way: row["peak"] for way, row in found.items() if way != "plain"}
    for way, budget in {**budgets, "the fewest": checkmate.min_budget(problem).peak}.items():
        step = checkmate.compile(model.plain, budget=budget, time_limit=TIME_LIMIT)
        name = f"checkmate, bytes of {way}" if way in found else "checkmate, the fewest bytes"
        try:
            found[name] = {"peak": resident + peak_of_step(model, step, (x, y))}
        except InfeasibleBudget as error:
            print(f"{name}: {error}")
            continue
        steps[name] = step
        found[name] |= {"budget": budget, "splits": list(step.plans[0].problem.splits), "planned": step.plans[0].peak}
    plain = trained(model.plain)
    for way, step in steps.items():
        results = trained(step)
        found[way] |= {"same_bits": not differing(results, plain), "difference": distance(results, plain)}
    runs = {way: partial(step_and_back, model, step, (x, y)) for way, step in steps.items()}
    seconds = seconds_in_turn(runs, rounds, model.zero_grad)
    for way, row in found.items():
        row |= {"way": way, "rounds": rounds, "seconds": statistics.median(seconds[way])}
        row["ratio"] = median_ratio(seconds[way], seconds["plain"])
        row |= {"rows": rows, "depth": depth, "classes": classes, "threads": torch.get_num_threads()}
    return [*found.values()]


BENCHMARK = Benchmark(
    __doc__,
    "loss.jsonl",
    ways,
    {
        "way": "{way}",
        "budget": "{budget:bytes}",
        "peak": "{peak:bytes}",
        "step": "{seconds:seconds}",
        "of plain": "{ratio:.2f}",
        "numbers": lambda row: "same bits" if row["same_bits"] else f"differ by {row['difference']:.1e}",
    },
    options={"rounds": (5, "of timed steps"), "small": (False, "few rows and classes")},
    quick={"small": True},
)

if __name__ == "__main__":
    BENCHMARK.run()
