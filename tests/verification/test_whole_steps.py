"""The first call of a whole training step, held against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.errors import VerificationError
from checkmate.updates.optimizers import Update
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 10


def _trained(*, verify: bool, gradients: bool = False, steps: int = 2) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"budget": "1 MB", "clip_norm": 0.1, "wait": "best"}
    loss_fn = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    step = checkmate.training_step(loss_fn, optimizer, verify=verify, gradients=gradients, **options)
    losses = [step(X, Y) for _ in range(steps)]
    return losses, step.norm, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_verified_trains_as_if_it_were_not(gradients: bool) -> None:
    """Everything is put back: parameters, running statistics, state that was not there, random numbers."""
    assert_same_bits(_trained(verify=True, gradients=gradients), _trained(verify=False))


def _next_value(tensor: Tensor) -> None:
    tensor.view(-1)[0] += 1e-4


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda parameter, state: _next_value(parameter), r"0\.weight of shape \(32, 32\)"),
        (lambda parameter, state: _next_value(state["exp_avg"]), r"exp_avg of AdamW for .*0\.weight"),
        (lambda parameter, state: state.update(seen=7), r"seen of AdamW for .*0\.weight"),  # a number is state, too
        (lambda parameter, state: torch.empty(1_000_000), "measured peak"),
    ],
    ids=["parameter", "state", "a number of the state", "bytes that no plan knows of"],
)
def test_an_update_that_does_otherwise_is_caught(
    spoil: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by little, in one parameter or in its state, or with more bytes."""
    really = Update.__call__

    def off(self: Update, gradient: Tensor, here: Tensor | None = None) -> None:
        really(self, gradient, here)
        if self.parameter.shape == (32, 32):
            with torch.no_grad():
                spoil(self.parameter, self.optimizer.state[self.parameter])

    monkeypatch.setattr(Update, "__call__", off)
    with pytest.raises(VerificationError, match=words):
        _trained(verify=True)
