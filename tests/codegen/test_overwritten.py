"""A backward whose tensors were written to since the step is refused, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_alike


def _compiled(step: Any, budget: int = 10**7) -> Any:
    return checkmate.compile(step, budget=budget, time_limit=1, profile="roofline:h100", cache=False)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


X = torch.ones(512, 8)


@pytest.mark.parametrize(
    ("end", "write", "shape"),
    [
        (lambda y: y.square().sum(), lambda net, x, y: net[2].weight.add_(1), r"\[64, 64\]"),
        (torch.exp, lambda net, x, y: x.zero_(), r"\[512, 8\]"),
        (torch.exp, lambda net, x, y: y.zero_(), r"\[512, 4\]"),
    ],
    ids=["a weight", "the batch", "a result"],
)
def test_what_plain_pytorch_needs_too(net: nn.Sequential, end: Any, write: Any, shape: str) -> None:
    x = X.clone()
    y = _compiled(lambda x: end(net(x)))(x)
    with torch.no_grad():
        write(net, x, y)
    said = rf"needs, a torch.FloatTensor of shape {shape}, was written to between the step and its backward"
    with pytest.raises(Unsupported, match=said):
        y.sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_a_weight_of_an_op_that_runs_again(net: nn.Sequential) -> None:
    """The bias is needed by no backward, but by the forward: plain PyTorch goes on, with a roomier budget ours too."""

    def step(x: Tensor) -> Tensor:
        return net(x).square().sum()

    def write_and_go_back(step: Callable[[Tensor], Tensor]) -> Tensor:
        net.zero_grad()
        loss = step(X)
        before = net[0].bias.detach().clone()
        with torch.no_grad():
            net[0].bias.add_(1)
        try:
            loss.backward()
        finally:
            with torch.no_grad():
                net[0].bias.copy_(before)
        return net[0].weight.grad

    assert_alike(write_and_go_back, step, _compiled(step))
    whole = replace(checkmate.trace(step, X, profile="roofline:h100"), next_split=None)  # no op runs in parts
    tight = _compiled(step, checkmate.min_budget(whole).peak)
    with pytest.raises(Unsupported, match=r"of shape \[64\], was written to .* a larger budget may keep"):
        write_and_go_back(tight)


def test_the_backward_is_over_before_the_write(net: nn.Sequential) -> None:
    """The error advises this order. A second backward of the same call comes after the write, and is refused."""
    step = _compiled(lambda x: net(x).square().sum())
    loss = step(X)
    loss.backward(retain_graph=True)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    with pytest.raises(Unsupported, match=r"before optimizer.step\(\)"):
        loss.backward()
    step(X).backward()


def test_what_nobody_needs_may_be_written_to(net: nn.Sequential) -> None:
    step = _compiled(lambda x: net(x).sum())
    y = step(X)
    with torch.no_grad():
        net[4].bias.zero_()
        y.zero_()
    y.backward()
    assert_same_bits(net[4].bias.grad, torch.full((4,), 512.0))
