"""Where plain PyTorch updates buffers twice, or trains nothing, because of a checkpoint: said there, and only there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.backends.tensor_state import differing
from checkmate.capture.higher_order import checkpoints
from tests.support.bits import assert_same_bits

Run = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_said", set())


class _Averaging(nn.Linear):
    """Keeps an average of its outputs; ``weighs``: and weighs them with it."""

    average: Tensor

    def __init__(self, weighs: bool) -> None:
        super().__init__(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.weighs = weighs

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y * self.average if self.weighs else y


def _plainly(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


_checkpointed: Run = partial(checkpoint, use_reentrant=False)
_NORM = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
_TWO = nn.Sequential(_NORM, copy.deepcopy(_NORM))


@pytest.mark.parametrize(
    ("net", "run", "named"),
    [
        (_NORM, _checkpointed, "1 (BatchNorm1d"),
        (_NORM[:2], partial(checkpoint, use_reentrant=True), "1 (BatchNorm1d"),
        (_TWO, lambda net, x: net[1](_checkpointed(net[0], x)), "0.1 (BatchNorm1d"),
        (_Averaging(weighs=True), _checkpointed, "_Averaging"),
        (_NORM, _plainly, ""),
        (copy.deepcopy(_NORM).eval(), _checkpointed, ""),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)), _checkpointed, ""),
        (_Averaging(weighs=False), _checkpointed, ""),  # of its checkpoint plain PyTorch runs the beginning again
    ],
)
def test_it_is_said_where_plain_pytorch_updates_buffers_twice(
    net: nn.Module, run: Run, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    plain, without, ours = (copy.deepcopy(net) for _ in range(3))
    for model, forward in ((plain, run), (without, _plainly)):
        forward(model, x).square().sum().backward()
    compiled = checkmate.compile(lambda x: run(ours, x).square().sum(), budget="1 GB", profile="roofline:h100")
    with caplog.at_level(logging.WARNING, "checkmate.capture.higher_order.checkpoints"):
        compiled(x).backward()
        assert_same_bits([*ours.buffers()], [*without.buffers()])
        compiled(x[:2]).backward()  # captured again
    assert bool(differing([*plain.buffers()], [*without.buffers()])) == bool(named)
    assert len(caplog.records) == bool(named)  # once
    assert named in caplog.text
    assert ("updates them twice" in caplog.text) == bool(named)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("reentrant", "needs_gradient", "trains"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_it_is_said_where_plain_pytorch_trains_nothing_in_a_checkpoint(
    reentrant: bool, needs_gradient: bool, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x, net, head = torch.randn(4, 8, requires_grad=needs_gradient), nn.Linear(8, 8), nn.Linear(8, 1)

    def step(x: Tensor) -> Tensor:
        return head(checkpoint(net, x, use_reentrant=reentrant)).sum()

    step(x).backward()
    assert (net.weight.grad is not None) == trains
    with caplog.at_level(logging.WARNING, "checkmate.capture.higher_order.checkpoints"):
        checkmate.compile(step, budget="1 GB", profile="roofline:h100")(x)
    for words in ("gives the parameters within no gradients", "test_checkpoints.py:"):
        assert (words in caplog.text) == (not trains)
