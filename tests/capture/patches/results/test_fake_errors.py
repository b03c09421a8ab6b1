"""Errors of descriptions that kernels do not have are refused as what they are; others are PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.versions import needs


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
        checkmate.Unsupported, match=r"unsqueeze_ changed[^$]*test_fake_errors.py:\d+[^$]*x\.unsqueeze\(0\)"
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


@needs("2.13", "its description takes them, too, and it is planned")
def test_what_a_kernel_takes_of_no_elements_is_refused() -> None:
    weight, nothing = torch.ones(1, 3, 2, requires_grad=True), torch.ones(1, 0, 3)

    def step() -> Tensor:
        return F.conv1d(nothing.bfloat16(), nothing[..., :2]).sum() + weight.sum()

    assert step() == 6
    with pytest.raises(checkmate.Unsupported, match=r"should be the same[^$]*no elements"):
        checkmate.compile(step, budget="1 MB")()
