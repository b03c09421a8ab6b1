"""Batch norms with momentum=None: bits, bytes and one plan, whatever they have counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.plainly import verify_to_the_byte

TRAINS = [(True, None), (True, None), (False, None), (True, None)]
MOMENTA = [(True, None), (True, 0.3), (True, None)]
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], torch.dtype, Any]] = {
    "1d": (nn.BatchNorm1d, (16, 6), {}, torch.float32, TRAINS),
    "2d, half": (nn.BatchNorm2d, (4, 6, 5, 5), {}, torch.bfloat16, TRAINS),
    "2d, autocast": (nn.BatchNorm2d, (4, 6, 5, 5), {}, torch.float32, TRAINS),
    "2d, no parameters": (nn.BatchNorm2d, (4, 6, 5, 5), {"affine": False}, torch.float32, TRAINS),
    "3d, no statistics": (nn.BatchNorm3d, (2, 6, 3, 3, 3), {"track_running_stats": False}, torch.float32, TRAINS),
    "1d, another momentum": (nn.BatchNorm1d, (16, 6), {}, torch.float32, MOMENTA),
}


@pytest.mark.parametrize("case", CASES)
def test_training_and_evaluation(case: str) -> None:
    """Outputs, gradients and averages, in steps with other counts, and where the mode or the momentum changes."""
    kind, shape, options, dtype, calls = CASES[case]
    plain = nn.Sequential(kind(6, momentum=None, **options), nn.ReLU(), kind(6, momentum=None, **options)).to(dtype)
    for weight in plain.parameters():
        nn.init.uniform_(weight)
    ours = copy.deepcopy(plain)
    compiled = checkmate.compile(ours, budget="1 MB")
    for training, momentum in calls:
        x = torch.randn(shape).to(dtype).requires_grad_()
        found: list[list[Any]] = []
        for net, run in ((ours, compiled), (plain, plain)):
            net.train(training)
            net[0].momentum = net[2].momentum = momentum
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in case):
                loss = run(x).float().square().mean()
            gradients = torch.autograd.grad(loss, [x, *net.parameters()])
            found.append([loss, *gradients, *net.buffers()])
        assert_same_bits(*found)
    assert len(compiled.plans) == 2  # one for each mode, or kind of momentum


def test_bytes_are_as_predicted_at_the_smallest_budget() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 16, 16)
    least = checkmate.min_budget(checkmate.trace(lambda x: net(x).square().mean(), x), time_limit=1)
    verify_to_the_byte(lambda x: net(x).square().mean(), x, budget=least.peak)
