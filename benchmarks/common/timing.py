"""What the demo and the benchmarks have in common: budgets, training, timing in pairs, how far numbers are apart."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from checkmate.core.files import VARIABLE

Step = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


def budget_at(share: float, smallest: int, keep_all: int) -> int:
    """Bytes at a share of the way from the smallest budget to keeping everything."""
    return smallest + int(share * (keep_all - smallest))


def train(
    module: nn.Module,
    step: Step,
    batches: Sequence[Batch],
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """Train a step for each batch, by default with a new Adam.

    Returns all there is to compare, copied to the CPU: losses, gradients, state, random state.
    """
    torch.manual_seed(seed)
    optimizer = optimizer or torch.optim.Adam(module.parameters(), lr=2e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    results = [torch.stack(losses), *grads, *module.state_dict().values()]
    on_host = [tensor.detach().to("cpu", copy=True) for tensor in results]
    module.zero_grad(set_to_none=True)
    return [*on_host, torch.get_rng_state()]


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, in each tensor in proportion to its largest element; infinite for other shapes."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    pairs = [(x.double(), y.double()) for x, y in zip(found, expected, strict=True) if x.numel()]
    return max((float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs), default=0.0)


@contextmanager
def nothing_on_disk() -> Iterator[None]:
    """No plan of an earlier run, and none of another budget, for planning to begin with."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {VARIABLE: folder}):
        yield


def step_and_back(module: nn.Module, step: Step, batch: Batch) -> None:
    """A forward and a backward, from no gradients."""
    module.zero_grad(set_to_none=True)
    step(*batch).backward()


def paired_times(
    module: nn.Module,
    plain: Step,
    compiled: Step,
    batch: Batch,
    pairs: int,
    finish: Callable[[], object] | None = None,
) -> tuple[float, float, float]:
    """Median seconds of a plain and a compiled step, and the median of their ratios, pair by pair.

    Both run within each pair, first one first, then the other, so that what else the machine does meets both.
    ``finish`` waits for what a step has started: a GPU works on while Python goes ahead.
    """
    times: dict[Step, list[float]] = {plain: [], compiled: []}
    for pair in range(pairs + 1):
        for step in (plain, compiled) if pair % 2 else (compiled, plain):
            module.zero_grad(set_to_none=True)
            if finish is not None:
                finish()
            began = time.perf_counter()
            step(*batch).backward()
            if finish is not None:
                finish()
            times[step].append(time.perf_counter() - began)
    (_, *plain_times), (_, *compiled_times) = times.values()  # the first pair warms up
    ratios = [b / a for a, b in zip(plain_times, compiled_times, strict=True)]
    return statistics.median(plain_times), statistics.median(compiled_times), statistics.median(ratios)
