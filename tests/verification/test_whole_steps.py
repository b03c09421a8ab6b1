"""The first call of a whole training step, held against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.updates.optimizers import Update
from checkmate.verification.outcomes import Outcome, names_that_differ
from checkmate.verification.whole_steps import NORM, compare_but_for_sums
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 10


def _trained(*, verify: bool, gradients: bool = False, steps: int = 2) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = checkmate.training_step(
        lambda x, y: F.cross_entropy(model(x), y),
        optimizer,
        budget="1 MB",
        clip_norm=0.1,
        verify=verify,
        gradients=gradients,
        wait="best",
    )
    losses = [step(X, Y) for _ in range(steps)]
    return losses, step.norm, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_verified_trains_as_if_it_were_not(gradients: bool) -> None:
    """Everything is put back: parameters, running statistics, state that was not there, random numbers."""
    assert_same_bits(_trained(verify=True, gradients=gradients), _trained(verify=False))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (lambda update: update.parameter, r"0\.weight of shape \(32, 32\)"),
        (lambda update: update.optimizer.state[update.parameter]["exp_avg"], r"exp_avg of AdamW for .*0\.weight"),
    ],
)
def test_what_differs_is_named(what: Callable[[Update], Tensor], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is off by little, in one parameter or in its state."""
    really = Update.__call__

    def off(self: Update, gradient: Tensor) -> None:
        really(self, gradient)
        if self.parameter.shape == (32, 32):
            with torch.no_grad():
                what(self).view(-1)[0] += 1e-4

    monkeypatch.setattr(Update, "__call__", off)
    with pytest.raises(checkmate.VerificationError, match=name):
        _trained(verify=True)


def test_a_peak_above_the_plan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that takes what no plan knows of."""
    really = Update.__call__

    def greedy(self: Update, gradient: Tensor) -> None:
        torch.empty(1_000_000)
        really(self, gradient)

    monkeypatch.setattr(Update, "__call__", greedy)
    with pytest.raises(checkmate.VerificationError, match="measured peak"):
        _trained(verify=True)


class _Sums:
    """Two outcomes of a step, with sums over parts that were off by a thousandth when they were tried."""

    def __init__(self) -> None:
        self.before = {"weight": torch.zeros(4)}
        names = ("output 0", "weight", "mean", "exp_avg of AdamW for weight", NORM)
        self.plain = {name: torch.full((4,), 2.0) for name in names}
        self.found = {name: t.clone() for name, t in self.plain.items()}

    def compare(self) -> float:
        plain, found = (Outcome(results, {}, 0) for results in (self.plain, self.found))
        return compare_but_for_sums(names_that_differ(plain, found), self.before, plain, found, rounding=1e-3)


@pytest.mark.parametrize(
    ("name", "allowed", "message"),
    [
        ("exp_avg of AdamW for weight", 2 * 16e-3, "exp_avg of AdamW for weight of the compiled step"),
        (NORM, 2 * 16e-3, "16 times what such sums were off by"),
        ("weight", 2 * 2.0, "moves no parameter by more than 2"),
        ("output 0", 0.0, "output 0 of the compiled step differs from plain PyTorch"),
        ("mean", 0.0, "mean of the compiled step differs from plain PyTorch"),
    ],
)
def test_what_sums_over_parts_make_may_be_off_by_rounding(name: str, allowed: float, message: str) -> None:
    outcomes = _Sums()
    outcomes.found[name][0] += 0.9 * allowed
    assert outcomes.compare() == pytest.approx(0.9 * allowed if name not in ("weight",) else 0.0, rel=1e-4)
    outcomes.found[name][0] += 0.2 * allowed + 1e-6
    with pytest.raises(checkmate.VerificationError, match=message):
        outcomes.compare()
