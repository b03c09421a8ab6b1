"""Context variables within a step hold what they do in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor

import checkmate
from tests.support.bits import assert_same_bits

collected: ContextVar[list[Tensor]] = ContextVar("collected")
factor: ContextVar[float] = ContextVar("factor", default=1.0)
weight = torch.linspace(1, 2, 3).requires_grad_()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _compiled(step: Any) -> Any:
    return checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")


def _collecting(x: Tensor, depth: int) -> list[Tensor]:
    token = collected.set([])
    try:
        collected.get().append(x * weight)
        if depth:
            collected.get().extend(_collecting(x.sin(), depth - 1))
        collected.get().append(x.cos())
        return collected.get()
    finally:
        collected.reset(token)


def test_a_part_that_sets_a_variable_again_leaves_the_whole_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.stack(_collecting(x, 2)).square().sum()

    x = torch.linspace(-1, 1, 3)
    assert_same_bits(_compiled(step)(x), step(x))
    with pytest.raises(LookupError):
        collected.get()


def test_what_was_set_outside_is_another_plan_when_it_changes() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * weight * factor.get()
        token = factor.set(3.0)
        y = y * factor.get()
        factor.reset(token)
        return (y * factor.get()).sum()

    compiled, x = _compiled(step), torch.ones(3)
    for value, plans in ((1.0, 1), (2.0, 2), (1.0, 2)):
        token = factor.set(value)
        assert_same_bits(compiled(x), step(x))
        factor.reset(token)
        assert len(compiled.plans) == plans


def test_a_step_that_leaves_one_set_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        factor.set(5.0)
        return (x * weight * factor.get()).sum()

    with pytest.raises(checkmate.Unsupported, match=r"sets factor \(contextvars.ContextVar\) and does not reset it"):
        _compiled(step)(torch.ones(3))
    assert factor.get() == 1.0
