"""The promise for whole steps: forward, backward and update within the budget, with the bits of the plain loop."""

from __future__ import annotations

import functools
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
X, Y = torch.randn(128, 64, generator=torch.Generator().manual_seed(3)), torch.arange(128) % 10


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def _loss_of(model: nn.Module) -> Any:
    return lambda x, y: F.cross_entropy(model(x), y)


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def _expected(clip_norm: float | None) -> TrainedWhole:
    model = _model()
    optimizer = _adamw(model)
    return train_whole(plain_step(_loss_of(model), [optimizer], clip_norm), model, [optimizer], (X, Y), steps=4)


def _step(budget: Any, **options: Any) -> tuple[TrainingStep, nn.Module, optim.Optimizer]:
    model = _model()
    optimizer = _adamw(model)
    options = {"wait": "best", "time_limit": 2.0, **options}
    return checkmate.training_step(_loss_of(model), optimizer, budget=budget, **options), model, optimizer


@functools.cache
def _problem(clip_norm: float | None) -> checkmate.Problem:
    step, _, _ = _step("1 GB", clip_norm=clip_norm)
    step(X, Y)
    return step.plans[0].problem


@pytest.mark.parametrize(
    ("share", "clip_norm"),
    [slow(0.0, None), slow(0.0, 0.1), long(0.5, None), slow(0.5, 0.1), slow(1.0, None), long(1.0, 0.1)],
)
def test_same_numbers_within_the_budget(share: float, clip_norm: float | None) -> None:
    """At the smallest budget, in between and at keep-all; the peak is predicted to the byte, state included."""
    problem = _problem(clip_norm)
    smallest = checkmate.min_budget(problem, time_limit=2.0).peak
    budget = int(smallest + share * (problem.keep_all_peak - smallest))
    step, model, optimizer = _step(budget, clip_norm=clip_norm)

    found = train_whole(step, model, [optimizer], (X, Y), steps=4)

    assert_same_bits(found.bits(), _expected(clip_norm).bits())
    (plan,) = step.plans
    peaks = found.peaks[1:]  # the first of these steps lets go of a norm that no meter has seen
    assert [plan.problem.resident + peak for peak in peaks] == [plan.peak] * len(peaks)
    assert len(peaks) == 2
    assert plan.peak <= budget


@pytest.mark.slow
def test_gradients_are_gone_or_kept() -> None:
    """After a step no gradient is left, unless they are asked for: then they are the clipped ones of plain PyTorch."""
    step, model, _ = _step("1 GB", clip_norm=0.1)
    step(X, Y)
    assert all(p.grad is None for p in model.parameters())
    step, model, _ = _step("1 GB", clip_norm=0.1, gradients=True)
    plain = _model()
    expected = plain_step(_loss_of(plain), [_adamw(plain)], 0.1)
    for _ in range(2):
        torch.manual_seed(5)
        step(X, Y)
        torch.manual_seed(5)
        expected(X, Y)
        assert_same_bits([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_norm_is_that_of_plain_pytorch() -> None:
    """The norm of all gradients before they are clipped."""
    step, _, _ = _step("1 GB", clip_norm=0.1)
    assert step.norm is None
    torch.manual_seed(5)
    step(X, Y)
    model = _model()
    torch.manual_seed(5)
    _loss_of(model)(X, Y).backward()
    assert_same_bits(step.norm, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def test_loss_with_others() -> None:
    """Of a tuple the loss is followed; the rest is handed out without a gradient."""
    model = _model()

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
        scores = model(x)
        return F.cross_entropy(scores, y), {"scores": scores}, 3

    optimizer = _adamw(model)
    step = checkmate.training_step(loss_fn, optimizer, budget="1 GB", wait="best")
    torch.manual_seed(7)
    loss, rest, number = step(X, Y)
    assert not loss.requires_grad
    assert not rest["scores"].requires_grad
    assert number == 3
    assert_same_bits(loss, _expected(None).losses[0])


@pytest.mark.slow
def test_parameters_that_join_are_updated() -> None:
    """A group that is added to the optimizer is updated from the next step on."""
    models = [_model(), _model()]
    made = [optim.SGD(model[0].parameters(), lr=0.1) for model in models]

    def between(i: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        if i == 1:
            optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.01})
            for p in model.parameters():
                p.grad = None

    step = checkmate.training_step(_loss_of(models[0]), made[0], budget="1 GB", wait="best")
    steps = step, plain_step(_loss_of(models[1]), [made[1]])
    found, expected = (
        train_whole(one, model, [o], (X, Y), between=functools.partial(between, model=model, optimizer=o))
        for one, model, o in zip(steps, models, made, strict=True)
    )
    assert_same_bits(found.bits(), expected.bits())


def test_refusals() -> None:
    """What cannot be planned is refused at once, with the way out."""
    model = _model()
    for optimizer, word in (
        (optim.LBFGS(model.parameters()), "several times"),
        (type("Own", (optim.SGD,), {})(model.parameters(), lr=0.1), "all gradients at once"),
    ):
        with pytest.raises(checkmate.Unsupported, match=word) as error:
            checkmate.training_step(_loss_of(model), optimizer, budget="1 GB")
        assert "reserve=" in str(error.value)
    hooked = _adamw(model)
    hooked.register_step_pre_hook(lambda *args: None)
    with pytest.raises(checkmate.Unsupported, match="hook"):
        checkmate.training_step(_loss_of(model), hooked, budget="1 GB")
    with pytest.raises(checkmate.Unsupported, match="two optimizers"):
        checkmate.training_step(_loss_of(model), [_adamw(model), _adamw(model)], budget="1 GB")
    with pytest.raises(TypeError, match="not list"):
        checkmate.training_step(_loss_of(model), [[]], budget="1 GB")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="clip_norm"):
        checkmate.training_step(_loss_of(model), _adamw(model), budget="1 GB", clip_norm=0.0)
    step = checkmate.training_step(lambda x: x.sum(), _adamw(model), budget="1 GB")
    with pytest.raises(checkmate.Unsupported, match="without a gradient"):
        step(X)
    with torch.no_grad(), pytest.raises(checkmate.Unsupported, match="no_grad"):
        step(X)


@pytest.mark.slow
def test_infeasible_budget_names_the_smallest() -> None:
    """And nothing has changed."""
    step, model, optimizer = _step("400 kB")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(checkmate.InfeasibleBudget) as error:
        step(X, Y)
    assert_same_bits(model.state_dict(), before)
    assert not optimizer.state
    step, model, optimizer = _step(error.value.min_budget)
    train_whole(step, model, [optimizer], (X, Y), steps=1)
