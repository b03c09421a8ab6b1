"""Batch norms with momentum=None: bits, bytes and one plan, whatever they have counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from tests.support.bits import assert_same_bits


def _net(kind: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(kind(6, momentum=None, **options), nn.ReLU(), kind(6, momentum=None, **options))
    for weight in net.parameters():
        nn.init.uniform_(weight)
    return net


TRAINS = [(True, None), (True, None), (False, None), (True, None)]
MOMENTA = [(True, None), (True, 0.3), (True, None)]


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "autocast", "calls"),
    [
        (nn.BatchNorm1d, {}, torch.float32, False, TRAINS),
        (nn.BatchNorm2d, {}, torch.bfloat16, False, TRAINS),
        (nn.BatchNorm2d, {}, torch.float32, True, TRAINS),
        (nn.BatchNorm2d, {"affine": False}, torch.float32, False, TRAINS),
        (nn.BatchNorm3d, {"track_running_stats": False}, torch.float32, False, TRAINS),
        (nn.BatchNorm1d, {}, torch.float32, False, MOMENTA),
    ],
    ids=["1d", "2d, half", "2d, autocast", "2d, no parameters", "3d, no statistics", "1d, another momentum"],
)
def test_training_and_evaluation(kind: Any, options: Any, dtype: torch.dtype, autocast: bool, calls: Any) -> None:
    """Outputs, gradients and averages, in steps with other counts, and where the mode or the momentum changes."""
    shape = {nn.BatchNorm1d: (16, 6), nn.BatchNorm2d: (4, 6, 5, 5), nn.BatchNorm3d: (2, 6, 3, 3, 3)}[kind]
    plain = _net(kind, **options).to(dtype)
    ours = copy.deepcopy(plain)
    compiled = checkmate.compile(ours, budget="1 MB")
    for training, momentum in calls:
        x = torch.randn(shape).to(dtype).requires_grad_()
        found: list[list[Any]] = []
        for net, run in ((ours, compiled), (plain, plain)):
            net.train(training)
            net[0].momentum = net[2].momentum = momentum
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(x).float().square().mean()
            gradients = torch.autograd.grad(loss, [x, *net.parameters()])
            found.append([loss, *gradients, *net.buffers()])
        assert_same_bits(*found)
    assert len(compiled.plans) == 2  # one for each mode, or kind of momentum


def test_bytes_are_as_predicted_at_the_smallest_budget() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 16, 16)
    least = checkmate.min_budget(checkmate.trace(lambda x: net(x).square().mean(), x), time_limit=1)
    report = checkmate.verify(lambda x: net(x).square().mean(), x, budget=least.peak)  # raises where bits differ
    assert report.measured_peak == report.predicted_peak <= least.peak
