"""A step that is compiled beside itself as plain PyTorch runs it: all that a call leaves has the same bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.stepping import assert_same, train


def compiled(step: Callable[..., Any], **options: Any) -> Any:
    """Compile within a budget that holds everything, and with the costs of a table: nothing is measured."""
    return checkmate.compile(step, **{"budget": "1 MB", "time_limit": 1, "profile": "roofline:h100", **options})


def at_smallest_budget(step: Callable[..., Any], *batch: Any) -> Any:
    """Compile within the smallest budget that a step has, with the costs of a table."""
    problem = checkmate.trace(step, *batch, profile="roofline:h100")
    return compiled(step, budget=checkmate.min_budget(problem, time_limit=1).peak)


def assert_refused(step: Callable[..., Any], *batch: Any, words: str, **options: Any) -> str:
    """Check that a step is refused in these words, which are a regular expression; return the whole message."""
    with nothing_drawn(), pytest.raises(Unsupported, match=words) as caught:
        compiled(step, **options)(*batch)
    return str(caught.value)


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Check that the block, which is a refusal, leaves all generators as they were."""
    before = _random_states()
    yield
    assert_same_bits(_random_states(), before)


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), repr(random.getstate()), np.random.get_state()[1:3]  # noqa: NPY002


def verify_to_the_byte(step: Callable[..., Any], *batch: Any, budget: int | str, time_limit: float = 1) -> Any:
    """Verify the bits of a step, and that its peak is the one foretold; return the report."""
    report = checkmate.verify(step, *batch, budget=budget, time_limit=time_limit)
    assert report.measured_peak == report.predicted_peak
    assert isinstance(budget, str) or report.measured_peak <= budget
    return report


def outcome(
    step: Callable[..., Any], *batch: Any, leaves: Sequence[Tensor] = (), seed: int | None = 0
) -> tuple[Any, ...]:
    """Results of a call, gradients of the first one, what the batch then holds, and the states of all generators.

    Args:
        step: that is called with a copy of the batch.
        batch: tensors, of which those that require a gradient get one, and other things.
        leaves: further tensors that get a gradient.
        seed: of the generators of PyTorch, Python and NumPy before the call; None leaves them where they are.
    """
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
    given = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in batch]
    results = step(*given)
    loss = results[0] if isinstance(results, tuple) else results
    wanted = [*leaves, *(t for t in given if isinstance(t, Tensor) and t.requires_grad)]
    gradients = torch.autograd.grad(loss, wanted)
    return results, gradients, given, *_random_states()


def assert_as_plain(
    step: Callable[..., Any],
    *batch: Any,
    leaves: Sequence[Tensor] = (),
    run: Callable[..., Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Compare a call of ``run``, or of the step as it is compiled with the options, with plain PyTorch; return it."""
    run = run or compiled(step, **options)
    expected = outcome(step, *batch, leaves=leaves, seed=seed)
    assert_same_bits(outcome(run, *batch, leaves=leaves, seed=seed), expected)
    return run


def assert_alike(left_by: Callable[[Any], Any], *runs: Any) -> Any:
    """Compare bits of all that a function leaves with each of several runs of a step; give what the first left."""
    first, *others = map(left_by, runs)
    for other in others:
        assert_same_bits(first, other)
    return first


def assert_each_as_plain(
    step: Callable[..., Any], *batches: tuple[Any, ...], plans: int, leaves: Sequence[Tensor] = (), **options: Any
) -> None:
    """Compare a call with each batch as above; all of them take so many plans."""
    run = compiled(step, **options)
    for seed, batch in enumerate(batches):
        assert_as_plain(step, *batch, leaves=leaves, run=run, seed=seed)
    assert len(run.plans) == plans


def train_as_plain(
    module: nn.Module, step: Callable[..., Tensor], *batch: Tensor, **options: Any
) -> tuple[checkmate.Solution, list[int]]:
    """Train a module by ``step(module, *batch)``, and a copy of it plainly, to the same bits.

    Args:
        module: that is trained.
        step: that gives the loss.
        batch: of each step.
        options: of the compilation, such as the budget.

    Returns:
        The plan, and the bytes in use at most of each step after the first.
    """
    plain = copy.deepcopy(module)
    run = checkmate.compile(lambda *batch: step(module, *batch), **{"time_limit": 1, "wait": "best", **options})
    found = train(module, run, batch)
    assert_same(found, train(plain, lambda *batch: step(plain, *batch), batch))
    (plan,) = run.plans
    return plan, [plan.problem.resident + peak for peak in found.peaks]


def train_at_smallest_budget(
    module: nn.Module, step: Callable[..., Tensor], *batch: Tensor, target: str
) -> tuple[checkmate.Solution, list[int]]:
    """Train as above within the smallest budget, which ops with this in their target allow by running again."""
    problem = checkmate.trace(lambda *batch: step(module, *batch), *batch)
    smallest = checkmate.min_budget(problem, time_limit=1).peak
    assert smallest < checkmate.min_budget(pinned(problem, target), time_limit=1).bound
    plan, peaks = train_as_plain(module, step, *batch, budget=smallest)
    assert any(target in name for name in run_again(plan))
    assert max(peaks) <= plan.peak <= smallest
    return plan, peaks


def pinned(problem: Problem, target: str) -> Problem:
    """The step where ops whose target has this in it run once."""
    ops = tuple(replace(op, pinned="here") if target in op.target else op for op in problem.graph.ops)
    return replace(problem, graph=replace(problem.graph, ops=ops), next_split=None)


def run_again(plan: checkmate.Solution) -> set[str]:
    """The targets of ops that a plan runs more than once."""
    return {op.target for op, times in zip(plan.problem.graph.ops, plan.schedule.recomputed, strict=True) if times}
