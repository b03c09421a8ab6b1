"""The networks themselves, in plain PyTorch: they train, and the same seed gives the same numbers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.networks import CASES
from checkmate.backends.tensor_state import differing


def _losses(name: str, steps: int = 3) -> list[float]:
    module, step, batch = CASES[name].make(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_three_steps_change_the_loss_and_repeat_bitwise(name: str, one_thread: None) -> None:
    first = _losses(name)
    assert len(set(first)) == 3
    assert first == _losses(name)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    module, step, batch = CASES[name].make(0)
    step(*batch).backward()
    without = [key for key, parameter in module.named_parameters() if parameter.grad is None]
    assert without == []


def test_another_seed_gives_another_network() -> None:
    (first, *_), (second, *_) = CASES["mlp"].make(0), CASES["mlp"].make(1)
    assert differing(first.parameters(), second.parameters())
