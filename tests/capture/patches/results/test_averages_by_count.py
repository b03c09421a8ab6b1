"""Batch norms with momentum=None: bits, bytes and one plan, whatever they have counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits

KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (16, 6)),
    "2d": (nn.BatchNorm2d, (4, 6, 5, 5)),
    "3d": (nn.BatchNorm3d, (2, 6, 3, 3, 3)),
}


def _net(kind: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(kind(6, momentum=None, **options), nn.ReLU(), kind(6, momentum=None, **options))
    for weight in net.parameters():
        nn.init.uniform_(weight)
    return net


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "autocast"),
    [
        ("1d", {}, torch.float32, False),
        ("2d", {}, torch.bfloat16, False),
        ("2d", {}, torch.float32, True),
        ("2d", {"affine": False}, torch.float32, False),
        ("3d", {"track_running_stats": False}, torch.float32, False),
    ],
)
def test_training_and_evaluation(kind: str, options: Any, dtype: torch.dtype, autocast: bool) -> None:
    """Outputs, gradients and averages, in steps with other counts, and where the mode changes."""
    make, shape = KINDS[kind]
    plain = _net(make, **options).to(dtype)
    ours = copy.deepcopy(plain)
    compiled = checkmate.compile(ours, budget="1 MB")
    for training in (True, True, False, True):
        x = torch.randn(shape).to(dtype).requires_grad_()
        found: list[list[Any]] = []
        for net, run in ((ours, compiled), (plain, plain)):
            net.train(training)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(x).float().square().mean()
            gradients = torch.autograd.grad(loss, [x, *net.parameters()])
            found.append([loss, *gradients, *net.buffers()])
        assert_same_bits(*found)
    assert len(compiled.plans) == 2  # one for each mode


def test_a_momentum_that_changes_is_seen() -> None:
    plain = _net(nn.BatchNorm1d)
    ours = copy.deepcopy(plain)
    compiled = checkmate.compile(ours, budget="1 MB")
    for momentum in (None, 0.3, None):
        x = torch.randn(16, 6)
        for net, run in ((ours, compiled), (plain, plain)):
            net[0].momentum = net[2].momentum = momentum
            run(x).square().mean().backward()
        assert_same_bits(ours.buffers(), plain.buffers())
    assert_same_bits([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_bytes_are_as_predicted_at_the_smallest_budget() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def step(x: Tensor) -> Tensor:
        return net(x).square().mean()

    x = torch.randn(4, 3, 16, 16)
    least = checkmate.min_budget(checkmate.trace(step, x))
    report = checkmate.verify(step, x, budget=least.peak)  # raises where bits differ
    assert report.measured_peak == report.predicted_peak <= least.peak
