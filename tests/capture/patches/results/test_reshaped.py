"""Where tracing loses track of a tensor whose shape was changed in place, that is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import checkmate
from tests.support.bits import assert_same_bits


def test_a_write_to_a_view_of_such_a_view_is_refused() -> None:
    weight = torch.ones(4, 4, requires_grad=True)

    def step() -> Tensor:
        turned = weight.square().sum(1).clone().view(4)
        turned.unsqueeze_(0)
        turned = turned.mT
        turned.nan_to_num_()
        return turned.sum()

    assert step() == 16
    with pytest.raises(
        checkmate.Unsupported, match=r"unsqueeze_ changed[^$]*test_reshaped.py:\d+[^$]*x\.unsqueeze\(0\)"
    ):
        checkmate.compile(step, budget="1 MB")()


def test_what_is_not_lost_is_captured() -> None:
    weight = torch.arange(12.0).view(3, 4).requires_grad_()

    def step() -> Tensor:
        made = weight * 1
        made.unsqueeze_(0)
        made.transpose_(1, 2)
        return (made @ weight).square().sum()

    found = [torch.autograd.grad(run(), weight) for run in (checkmate.compile(step, budget="1 MB"), step)]
    assert_same_bits(*found)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|must match|Expected size"):
        checkmate.compile(lambda: (weight * 1).unsqueeze_(0) @ torch.ones(7, 3), budget="1 MB")()
