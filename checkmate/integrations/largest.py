"""The largest batch of a loop that keeps something beside its steps: `checkmate.max_batch_size` with that left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from checkmate.backends.planner import Options
from checkmate.batch.max_batch_size import max_batch_size
from checkmate.batch.result import LargestBatch
from checkmate.errors import InfeasibleBudget
from checkmate.integrations.planned_call import Loop
from checkmate.units import exact_bytes, format_bytes, parse_bytes


def largest_batch(
    step: Callable[[Any], Any],
    loader: Any,
    asked: Options,
    module: nn.Module,
    loop: Loop,
    options: Mapping[str, Any],
    prepare: Callable[[Any], Any] = lambda batch: batch,
) -> LargestBatch:
    """Find the largest batch of a module's step, within a budget of which the loop around it needs a part.

    Batches are made of the rows of a loader's data, and prepared. Those that the loop holds beside the one at hand grow
    with it: the step is given them too, and reads one.

    Raises:
        InfeasibleBudget: if the loop leaves nothing, or the smallest size does not fit what it leaves.
    """
    rows, kept = loader.dataset, replace(loop, ahead=0).kept(module, (), {})
    total = parse_bytes(asked.budget)
    beside = asked.set_aside + kept.total

    def one_of(batch: Any, *others: Any) -> Any:
        return step(batch)

    def batches(n: int) -> tuple[Any, ...]:
        batch = prepare(loader.collate_fn([rows[i % len(rows)] for i in range(n)]))
        return batch, *(copy.deepcopy(batch) for _ in range(loop.ahead))

    was_training = module.training
    module.train()
    try:
        with torch.enable_grad():
            options = {"largest": len(rows), **options}
            return max_batch_size(lambda: one_of, batches, max(1, total - beside), **options)
    except InfeasibleBudget as error:
        least = error.min_budget + beside
        raise InfeasibleBudget(
            f"{error} Beside a step training keeps {kept}: {exact_bytes(least)} in all, of a budget of "
            f"{format_bytes(total)}.",
            budget=total,
            min_budget=least,
            op=error.op,
        ) from None
    finally:
        module.train(was_training)
