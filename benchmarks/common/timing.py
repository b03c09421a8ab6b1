"""Measures that benchmarks share: budgets, timing in pairs, how far numbers are apart."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.networks.batches import Batch, Step
from checkmate.core.files import VARIABLE
from checkmate.memory import CPU


def budget_at(share: float, smallest: int, keep_all: int) -> int:
    """Bytes at a share of the way from the smallest budget to keeping everything."""
    return smallest + int(share * (keep_all - smallest))


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


def finish(device: torch.device) -> None:
    """Wait for what a GPU was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def let_go() -> None:
    """Collect garbage, and have PyTorch give back what it keeps of a GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def step_and_back(module: nn.Module, step: Step, batch: Batch) -> None:
    """A forward and a backward, from no gradients."""
    module.zero_grad(set_to_none=True)
    step(*batch).backward()


def add_up(owner: Any, name: str, spent: dict[str, float], part: str) -> Any:
    """A patch, within which the seconds of a function's calls add up to those of a part."""
    run: Callable[..., Any] = getattr(owner, name)

    @wraps(run)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

    return patch.object(owner, name, timed)


def seconds_in_turn(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
    device: torch.device = CPU,
) -> dict[str, list[float]]:
    """Seconds of each step in each round, in which all take turns, so that what else the machine does meets all.

    The first round warms up, and is not counted; every second one goes the other way round.

    Args:
        steps: by name.
        rounds: how many count.
        before: is called before each step, and is not timed.
        device: is waited for, before each step and at its end.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name in [*steps][:: 1 if i % 2 else -1]:
            before()
            finish(device)
            began = time.perf_counter()
            steps[name]()
            finish(device)
            taken[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in taken.items()}


def median_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def paired_times(
    module: nn.Module, plain: Step, compiled: Step, batch: Batch, pairs: int, device: torch.device = CPU
) -> tuple[float, float, float]:
    """Median seconds of a plain and a compiled step, and the median of their ratios."""
    steps = {"plain": lambda: plain(*batch).backward(), "compiled": lambda: compiled(*batch).backward()}
    theirs, ours = seconds_in_turn(steps, pairs, module.zero_grad, device).values()
    return statistics.median(theirs), statistics.median(ours), median_ratio(ours, theirs)
