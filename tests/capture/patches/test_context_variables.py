"""Context variables within a step hold what they do in plain PyTorch."""

from __future__ import annotations

from contextvars import ContextVar

import pytest
import torch
from torch import Tensor

from tests.support.plainly import assert_as_plain, assert_refused, compiled

pytestmark = pytest.mark.usefixtures("forgotten", "one_thread")
collected: ContextVar[list[Tensor]] = ContextVar("collected")
factor: ContextVar[float] = ContextVar("factor", default=1.0)
weight = torch.linspace(1, 2, 3).requires_grad_()


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
    assert_as_plain(lambda x: torch.stack(_collecting(x, 2)).square().sum(), torch.linspace(-1, 1, 3), leaves=[weight])
    with pytest.raises(LookupError):
        collected.get()


def test_what_was_set_outside_is_another_plan_when_it_changes() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * weight * factor.get()
        token = factor.set(3.0)
        y = y * factor.get()
        factor.reset(token)
        return (y * factor.get()).sum()

    run = compiled(step)
    for value, plans in ((1.0, 1), (2.0, 2), (1.0, 2)):
        token = factor.set(value)
        assert_as_plain(step, torch.ones(3), run=run, leaves=[weight])
        factor.reset(token)
        assert len(run.plans) == plans


def test_a_step_that_leaves_one_set_is_refused() -> None:
    words = r"sets factor \(contextvars.ContextVar\) and does not reset it"
    assert_refused(lambda x: (x * weight * (factor.set(5.0), factor.get())[1]).sum(), torch.ones(3), words=words)
    assert factor.get() == 1.0
