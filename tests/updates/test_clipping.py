"""Clipping within a whole step: the bits of `torch.nn.utils`, for every norm, and plans that make gradients twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.updates.gradients import Clipping, norm_of, order_of
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.whole_steps import plain_step, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(32, 24, generator=torch.Generator().manual_seed(3))


class Mixed(nn.Module):
    """Parameters of three types, in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        types = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64]
        self.layers = nn.ModuleList([nn.Linear(24, 24, dtype=dtype) for dtype in types])
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))  # a number: the factor is not of its type

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return (self.scale * x).double().square().mean()


def _step(loss_fn: Any, optimizer: optim.Optimizer, **options: Any) -> checkmate.training.TrainingStep:
    options = {"budget": "1 GB", "wait": "best", "time_limit": 1.0, **options}
    return checkmate.training_step(loss_fn, optimizer, **options)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        *(({"clip_norm": 0.01, "norm_type": p}, 1) for p in (1, 2, 3.5, math.inf)),
        ({"clip_norm": 0.01}, 2),
        *(({"clip_value": 1e-4}, accumulate) for accumulate in (1, 2)),
    ],
    ids=str,
)
def test_same_bits_as_plain_pytorch(options: dict[str, Any], accumulate: int) -> None:
    """Of gradients in several types, whose norms are added by type, in the order of the parameters."""
    models = Mixed(), Mixed()
    several = [optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = _step(models[0], several[0], accumulate=accumulate, gradients=True, **options)
    expected = plain_step(models[1], several[1:], accumulate=accumulate, **options)
    for i in range(4):
        assert_same_bits(step(X), expected(X))
        if (i + 1) % accumulate == 0:
            grads = [[p.grad for p in model.parameters()] for model in models]
            assert_same_bits(*grads)
            if "clip_norm" in options:
                clipped = torch.nn.utils.get_total_norm(grads[0], options.get("norm_type", 2.0))
                assert step.norm is not None
                assert step.norm > clipped  # something was clipped
    assert_same_bits(*(model.state_dict() for model in models))


def test_order_of_norms() -> None:
    """By type in PyTorch's order, within a type that of the parameters."""
    gradients = [torch.rand(50, dtype=p.dtype) for p in Mixed().parameters()]
    norms = [norm_of(g, 2.0) for g in gradients]
    clipping = Clipping(most=1.0)
    clipping.coefficient([norms[i] for i in order_of(gradients)])
    assert_same_bits(clipping.norm, torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_norm_that_is_not_finite(accumulate: int) -> None:
    """Is an error where a person wants it so, before anything is updated; else gradients are multiplied by it."""
    model = nn.Linear(24, 1)
    before = {name: t.clone() for name, t in model.state_dict().items()}

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).sum() * math.inf

    step = _step(loss_fn, optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0, accumulate=accumulate)
    strict = _step(
        loss_fn, optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0, accumulate=accumulate, error_if_nonfinite=True
    )
    for _ in range(accumulate - 1):
        strict(X)
    with pytest.raises(RuntimeError, match=r"non-finite|is (nan|inf)"):
        strict(X)
    assert_same_bits(model.state_dict(), before)
    for _ in range(accumulate):
        step(X)
    assert model.weight.isnan().all()


class Wide(nn.Module):
    """Few activations, large gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_gradients_that_are_made_twice() -> None:
    """With a budget for some gradients only, a part of the backward runs again once the norm is known; same bits."""
    x = X[:2, :24].repeat(1, 2)
    problem = None
    for budget in ("1 GB", None):
        models = Wide(), Wide()
        several = [optim.SGD(model.parameters(), lr=0.1) for model in models]
        if problem is not None:
            budget = recomputing(problem, time_limit=2.0)
        step = _step(models[0], several[0], clip_norm=0.01, budget=budget)
        found = train_whole(step, models[0], several[:1], (x,))
        assert_same_bits(
            found.bits(), train_whole(plain_step(models[1], several[1:], 0.01), models[1], several[1:], (x,)).bits()
        )
        problem = step.plans[0].problem
    again = step.plans[0].modules.again
    gradients = sum(p.nbytes for p in models[0].layers.parameters())
    assert any(name.startswith("mm") for name in again), again  # a product of the backward
    assert step.plans[0].peak - problem.resident < gradients  # all of which were there before the first update


def test_limits_that_are_none() -> None:
    """At once."""
    model = Wide()
    for options, word in (
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"clip_value": 0.0}, "clip_value"),
        ({"clip_value": 1.0, "clip_norm": 1.0}, "one of them"),
    ):
        with pytest.raises(ValueError, match=word):
            _step(model, optim.SGD(model.parameters(), lr=0.1), **options)
