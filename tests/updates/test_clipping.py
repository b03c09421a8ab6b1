"""Clipping within a whole step: the bits of `torch.nn.utils`, for every norm, and plans that make gradients twice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.whole_steps import assert_as_plain, planned_step, training

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
    """Norms of gradients in several types are added by type, in the order of the parameters."""

    def train(make: Callable[..., Any]) -> Any:
        model = Mixed()
        step, left = make(model, optim.SGD(model.parameters(), lr=0.1), accumulate=accumulate, **options), []
        for i in range(4):
            left.append(step(X))
            if (i + 1) % accumulate == 0:
                grads = [p.grad for p in model.parameters()]
                left += [[grad.clone() for grad in grads], getattr(step, "norm", None)]
                if "clip_norm" in options:
                    assert step.norm > nn.utils.get_total_norm(grads, options.get("norm_type", 2.0))
        return left, model.state_dict()

    assert_as_plain(train, gradients=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_norm_that_is_not_finite(accumulate: int) -> None:
    """It is an error where a person wants it so, before any update; else gradients are multiplied by it."""
    model, about = nn.Linear(24, 1), {"clip_norm": 1.0, "accumulate": accumulate}
    before = copy.deepcopy(model.state_dict())

    def made(**options: Any) -> Any:
        return planned_step(
            lambda x: model(x).sum() * math.inf, optim.SGD(model.parameters(), lr=0.1), **about, **options
        )

    strict, step = made(error_if_nonfinite=True), made()
    for _ in range(accumulate - 1):
        strict(X)
    with pytest.raises(RuntimeError, match=r"non-finite|is (nan|inf)"):
        strict(X)
    assert_same_bits(model.state_dict(), before)
    for _ in range(accumulate):
        step(X)
    assert model.weight.isnan().all()


def wide() -> nn.Module:
    """A model of few activations, with large gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(48, 48), nn.GELU())))


@pytest.mark.slow
def test_gradients_that_are_made_twice() -> None:
    """Where not all gradients fit, a part of the backward runs again once the norm is known."""
    how = {"loss": lambda model: lambda x: model(x).square().mean(), "batch": (X[:2].repeat(1, 2),)}
    train = training(wide, lambda model: optim.SGD(model.parameters(), lr=0.1), clip_norm=0.01, **how)
    problem = assert_as_plain(train)[0].plans[0].problem
    (plan,) = assert_as_plain(train, budget=recomputing(problem, time_limit=2.0))[0].plans
    gradients = sum(p.nbytes for p in wide().parameters())
    assert any(name.startswith("mm") for name in plan.modules.again), plan.modules.again  # a product of the backward
    assert plan.peak - problem.resident < gradients  # all of which were there before the first update
