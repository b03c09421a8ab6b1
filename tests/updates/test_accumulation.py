"""Whole steps of several micro-batches: their gradients are summed as plain PyTorch sums them, within the budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.training import TrainingStep
from tests.support.bits import assert_same_bits
from tests.support.sampling import long, slow
from tests.support.whole_steps import TrainedWhole, plain_step, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 10


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(32, 10))


def _made(make: Callable[..., Any], accumulate: int, **options: Any) -> tuple[Any, nn.Module, optim.Optimizer]:
    model = _model()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) / accumulate

    return make(loss_fn, optimizer, accumulate=accumulate, **options), model, optimizer


def _whole(loss_fn: Any, optimizer: optim.Optimizer, **options: Any) -> TrainingStep:
    return checkmate.training_step(loss_fn, optimizer, wait="best", time_limit=1.0, **options)


def _plain(loss_fn: Any, optimizer: optim.Optimizer, **options: Any) -> Any:
    return plain_step(loss_fn, [optimizer], **options)


def _trained(step: Any, model: nn.Module, optimizer: optim.Optimizer, steps: int = 7) -> TrainedWhole:
    return train_whole(step, model, [optimizer], (X, Y), steps=steps)


@functools.cache
def _problems(**options: Any) -> list[checkmate.Problem]:
    step, _, _ = _made(_whole, 2, budget="1 GB", **options)
    for _ in range(2):
        step(X, Y)
    return [plan.problem for plan in step.plans]


@pytest.mark.parametrize(("share", "clip_norm"), [slow(0.0, 0.1), long(0.0, None), long(1.0, 0.1), long(1.0, None)])
def test_same_numbers_within_the_budget(share: float, clip_norm: float | None) -> None:
    """Of two and a half updates of three micro-batches, at the smallest budget of both graphs and with room.

    The peak of each kind of call is predicted to the byte; sums of gradients are resident.
    """
    problems = _problems(clip_norm=clip_norm)
    smallest = max(checkmate.min_budget(problem, time_limit=1.0).peak for problem in problems)
    budget = int(smallest + share * (max(problem.keep_all_peak for problem in problems) - smallest))
    step, model, optimizer = _made(_whole, 3, budget=budget, clip_norm=clip_norm)

    found = _trained(step, model, optimizer)

    assert_same_bits(found.bits(), _trained(*_made(_plain, 3, clip_norm=clip_norm)).bits())
    adding, last = step.plans
    assert adding.peak <= budget
    assert last.peak <= budget
    parameters = sum(p.nbytes for p in model.parameters())
    peaks = [plan.peak - plan.problem.resident for plan in (adding, last)]
    first = peaks[0] + parameters  # where the sums are not there yet
    again, _planning, *others, updating, _ = found.peaks
    assert [again, *others, found.peaks[-1]] == [peaks[0], first, peaks[0], first]
    assert updating == peaks[1] if clip_norm else updating <= peaks[1]  # sums that are used are gone before the end


@pytest.mark.slow
def test_gradients_between_micro_batches_are_those_of_plain_pytorch() -> None:
    """Shown as ``.grad``; gone after the update, or kept and clipped. What a person does to them counts."""
    for keep in (False, True):
        step, model, _ = _made(_whole, 2, budget="1 GB", clip_norm=0.1, gradients=keep)
        expected, plain, _ = _made(_plain, 2, clip_norm=0.1)
        for i in range(6):
            for one in (step, expected):
                torch.manual_seed(i)
                one(X, Y)
            if i == 2:
                for p in (*model.parameters(), *plain.parameters()):
                    p.grad.mul_(0.3)
            if i == 4:
                model[0][0].weight.grad = plain[0][0].weight.grad = None
            if i % 2 == 0 or keep:
                assert_same_bits([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
            else:
                assert all(p.grad is None for p in model.parameters())
        assert_same_bits(model.state_dict(), plain.state_dict())
        assert len(step.plans) == 2


@pytest.mark.slow
def test_gradients_that_a_person_holds_stay() -> None:
    """What ``.grad`` was before the update is not written over by the next accumulation."""
    step, model, _ = _made(_whole, 2, budget="1 GB")
    step(X, Y)
    held = model[0][0].weight.grad
    step(X, Y)
    before = held.clone()
    step(X, Y)
    step(X, Y)
    assert_same_bits(held, before)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "norm_type": math.inf}, {"clip_value": 1e-3}])
def test_update_by_fewer(options: dict[str, Any]) -> None:
    """An epoch whose number of batches is no multiple ends with an update by those that there were."""
    steps = [_made(_whole, 3, budget="1 GB", **options), _made(_plain, 3, **options)]
    for step, _, _ in steps:
        torch.manual_seed(1)
        for _ in range(5):
            step(X, Y)
        step.update()
    (step, model, optimizer), (_, plain, expected) = steps
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert_same_bits(optimizer.state_dict(), expected.state_dict())
    step.update()  # nothing was added since
    assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_parameters_that_get_gradients_in_some_micro_batches_only() -> None:
    """A parameter that the last micro-batch does not use is clipped and updated by the sum of the others."""
    made = []
    for make in (functools.partial(_whole, budget="1 GB"), _plain):
        torch.manual_seed(0)
        a, b = nn.Linear(32, 10), nn.Linear(32, 10)
        optimizer = optim.AdamW([*a.parameters(), *b.parameters()], lr=1e-2)

        def loss_fn(x: Tensor, y: Tensor, *, both: bool, a: nn.Module = a, b: nn.Module = b) -> Tensor:
            return F.cross_entropy(a(x) + b(x) if both else a(x), y)

        step = make(loss_fn, optimizer, accumulate=2, clip_norm=0.1)
        for both in (True, False, False, False, False, True):
            step(X, Y, both=both)
        made.append((a.state_dict(), b.state_dict(), optimizer.state_dict()))
    assert_same_bits(*made)


@pytest.mark.parametrize("accumulate", [0, 1.5, True])
def test_a_number_that_is_none(accumulate: Any) -> None:
    """At once."""
    with pytest.raises(ValueError, match="accumulate is a whole number"):
        _made(_whole, accumulate, budget="1 GB")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_of_zeros(accumulate: int) -> None:
    """Rounding has one, there before others; the update, by which the weight decays, waits for what reads it."""
    made = []
    for make in (functools.partial(_whole, budget="1 GB"), _plain):
        torch.manual_seed(0)
        a, b = nn.Parameter(3 * torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))
        optimizer = optim.SGD([a, b], lr=0.5, weight_decay=0.5)

        def loss_fn(x: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return (x @ b @ a.detach()).square().sum() + a.round().sum()

        step = make(loss_fn, optimizer, accumulate=accumulate)
        for _ in range(2 * accumulate):
            step(X / 100)
        made.append((a.detach(), b.detach(), optimizer.state_dict()))
    assert_same_bits(*made)
