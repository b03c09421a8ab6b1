"""Parameters that the loss itself writes to: what it has written is what the update starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.sampling import every
from tests.support.whole_steps import assert_as_plain, itself, training

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES = torch.tensor([[1, 2, 3], [3, 3, 19]])


class _Loss(nn.Module):
    """A table whose rows go through a weight; ``write`` is called with the weight before and after its use."""

    def __init__(self, write: Callable[[Tensor, bool], Any], max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 8, max_norm=max_norm)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.write = write

    def forward(self, places: Tensor) -> Tensor:
        self.write(self.weight, True)
        loss = (self.table(places) @ self.weight).square().sum()
        self.write(self.weight, False)
        return loss


LOSSES: dict[str, Callable[[], _Loss]] = {
    "max_norm": lambda: _Loss(lambda weight, first: None, max_norm=0.5),
    "divided by its norm": lambda: _Loss(lambda weight, first: first and weight.data.div_(weight.data.norm())),
    "clamped": lambda: _Loss(torch.no_grad()(lambda weight, first: first and weight.clamp_(-0.5, 0.5))),
    "a row of zeros": lambda: _Loss(torch.no_grad()(lambda weight, first: first and weight[0].zero_())),
    "written after its use": lambda: _Loss(lambda weight, first: first or weight.data.clamp_(-0.5, 0.5)),
    "written twice": lambda: _Loss(lambda weight, first: weight.data.mul_(0.9)),
}


def _training(name: str, **how: Any) -> Any:
    by = lambda model: optim.AdamW(model.parameters(), lr=0.1)  # noqa: E731
    return training(LOSSES[name], by, loss=itself, batch=(PLACES,), steps=4, **how)


@pytest.mark.parametrize("name", every(3, LOSSES))
def test_whole_steps_train_as_plain_pytorch_does(name: str) -> None:
    budget: int | str = "1 GB"
    for share in (1, 0):
        step, found = assert_as_plain(_training(name), budget=budget)
        (plan,) = step.plans
        assert {plan.problem.resident + peak for peak in found.peaks} == {plan.peak}, share
        budget = checkmate.min_budget(plan.problem, time_limit=1).peak


@pytest.mark.parametrize("name", ["max_norm", "clamped"])
def test_several_calls_and_clipping(name: str) -> None:
    assert_as_plain(_training(name, metered=False, accumulate=2, clip_norm=0.1))


def test_what_is_stored_behind_the_forward_is_read_before_only() -> None:
    """An op that reads the weight as it was does not run again in the backward, though the budget is the smallest."""

    def train(*, planned: bool) -> Any:
        weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

        def step(x: Tensor) -> Tensor:
            loss = (x @ weight).square().sum()
            weight.data.clamp_(-0.5, 0.5)
            return loss

        x = torch.linspace(0, 1, 32).view(4, 8)
        smallest = checkmate.min_budget(checkmate.trace(step, x), time_limit=1).peak
        run = checkmate.compile(step, budget=f"{smallest} B", wait="best") if planned else step
        loss = run(x)
        loss.backward()
        return loss.detach(), weight.detach(), weight.grad

    assert_same_bits(train(planned=True), train(planned=False))
