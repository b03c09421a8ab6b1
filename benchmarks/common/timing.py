"""What the demo and the benchmarks have in common: train, time in pairs, compare bits, write a table."""

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


def train(module: nn.Module, step: Step, batches: Sequence[Batch], seed: int = 0) -> list[Tensor]:
    """Train with Adam, a step for each batch. All there is to compare: losses, gradients, state, random state."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    state = [tensor.clone() for tensor in module.state_dict().values()]
    module.zero_grad(set_to_none=True)
    return [torch.stack(losses), *grads, *state, torch.get_rng_state()]


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in lines
    )
