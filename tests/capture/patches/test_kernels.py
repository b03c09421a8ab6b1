"""Ops that tracing would decompose run as eager PyTorch runs them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import checkmate
from checkmate.capture.patches.kernels import _folds
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, compiled
from tests.support.sampling import every
from tests.support.seen import Seen

pytestmark = pytest.mark.usefixtures("one_thread")
X = (2, 3, 9, 7)
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, size=(13, 20), mode="bilinear", align_corners=True),
    "bilinear, antialias": lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "nearest-exact": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "linear": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "area": lambda x: F.interpolate(x, size=(4, 4), mode="area"),
    "softshrink": lambda x: F.softshrink(x, 0.2),
    "hardshrink": lambda x: F.hardshrink(x, 0.2),
    "multi-margin": lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([3, 5])),
    "grid sample": lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3) + F.adaptive_max_pool2d(x, 3),
    "pad": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "pixel shuffle": lambda x: F.pixel_unshuffle(F.pad(x, (0, 1, 0, 1)), 2),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.mish(x) + F.silu(x) + F.hardswish(x) + F.elu(x),
    "softplus": lambda x: F.softplus(x) + F.logsigmoid(x) + F.leaky_relu(x) + F.rrelu(x, training=True) + F.celu(x),
    "norms": lambda x: F.group_norm(x, 3) + F.instance_norm(x) + F.local_response_norm(x, 2),
    "losses": lambda x: F.huber_loss(x, x.detach() * 2) + F.smooth_l1_loss(x, x.detach() * 3) + F.kl_div(x, x.exp()),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3) + F.normalize(x, dim=1),
    "added products": lambda x: (
        torch.addcdiv(x, x.cos(), x.exp(), value=0.3) + torch.addcmul(x, x.cos(), x, value=0.3)
    ).addcdiv_(x.sin(), x.exp(), value=0.7),
    "vector times matrices": lambda x: torch.linspace(0, 1, 9) @ x,
    "matrices times one": lambda x: x[:, 0] @ torch.linspace(0, 1, 35).view(1, 7, 5),
    "matrices of other strides times one": lambda x: x[0].transpose(1, 2) @ torch.linspace(0, 1, 18).view(9, 2),
    "matrices times a vector": lambda x: x.transpose(2, 3) @ torch.linspace(0, 1, 9),
    "one matrix of other strides times a vector": lambda x: x[:, :, :1].transpose(0, 2) @ torch.linspace(0, 1, 7),
    "every second column of matrices times a vector": lambda x: x[..., ::2] @ torch.linspace(0, 1, 4),
    "matrix times matrices": lambda x: torch.linspace(0, 1, 36).view(4, 9) @ x,
    "dropout of nothing": lambda x: F.dropout(x.sin()[:, :, :, :5], 0.0),
    "dropout in evaluation": lambda x: F.dropout(x.sin()[:, :, :, :5], 0.5, training=False),
    "linear algebra": lambda x: (
        torch.linalg.vector_norm(x, dim=1) + torch.cdist(x[0], x[1]).sum() + x.logcumsumexp(2)[:, 0]
    ),
    "multilabel-margin": lambda x: F.multilabel_margin_loss(
        x[:, 0].flatten(1), F.pad(torch.tensor([[2, 40, 7], [1, 0, 30]]), (0, 60), value=-1)
    ),
}


@pytest.mark.parametrize("name", every(2, STEPS))
def test_same_bits_as_eager(name: str) -> None:
    _check(STEPS[name])


def test_dropout_of_complex_numbers_draws_as_the_kernel() -> None:
    try:
        F.dropout(torch.ones(2).cfloat())
    except NotImplementedError:
        pytest.skip("this PyTorch drops out no complex numbers")

    def dropout(x: Tensor) -> Tensor:
        strided = F.dropout(torch.complex(x, x.cos()).transpose(1, 3), 0.4).abs()
        return strided + F.dropout(x.cfloat(), 0.3).real.transpose(1, 3)

    _check(dropout)


def _at_smallest_budget(step: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    budget = checkmate.min_budget(checkmate.trace(step, x, profile="roofline:h100"), time_limit=1).peak
    return compiled(step, budget=budget)


def _check(function: Callable[[Tensor], Tensor]) -> None:
    """The bits of plain PyTorch at the smallest budget, and its random state."""
    x = torch.randn(X, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return function(x.sin()).square().sum()

    assert_as_plain(step, x, run=_at_smallest_budget(step, x))


def test_dropout_of_everything_draws_nothing() -> None:
    layers = torch.nn.LSTM(8, 8, 2, dropout=1.0)

    def step(x: Tensor) -> Tensor:
        F.dropout(x, 1.0)  # nothing reads it
        assert F.dropout(x[:0].cfloat(), 0.5).is_complex()
        read = F.dropout(x / 0, 1.0), F.dropout(x.detach().transpose(0, 1), 1.0), F.dropout(x[:0], 0.5)
        attention = F.scaled_dot_product_attention(x, x, x, dropout_p=1.0)
        return x.square().sum() + sum(part.nan_to_num(2.0).sum() for part in (*read, attention, layers(x)[0]))

    x = torch.randn(3, 5, 8, requires_grad=True)
    run = _at_smallest_budget(step, x)
    assert_as_plain(step, x, run=run, leaves=[*layers.parameters()])
    before = torch.get_rng_state()
    run(x)
    assert_same_bits(torch.get_rng_state(), before)


@pytest.mark.parametrize("op", [torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.dropout.default])
def test_decompositions_come_back(op: torch._ops.OpOverload) -> None:
    before = dict(op.py_kernels)
    assert before
    checkmate.trace(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sum(), torch.randn(X, requires_grad=True)
    )
    assert dict(op.py_kernels) == before


def test_products_take_the_kernel_of_eager() -> None:
    """Batches of random strides, and of one, times a vector or a matrix, from either side."""
    draw = random.Random(0)
    for _ in range(1000):
        batches = torch.zeros([draw.choice((1, 1, 2, 3)) for _ in range(draw.choice((3, 4)))])
        batches = batches.permute(draw.sample(range(batches.ndim), batches.ndim))[..., :: draw.choice((1, 1, 2))]
        batches = draw.choice((batches, batches[:, :1], batches[:1].expand(3, *batches.shape[1:])))
        if left := draw.random() < 0.5:
            batches = batches.mT
        length = batches.shape[-2 if left else -1]
        other = draw.choice((torch.zeros(length), torch.zeros((2, length) if left else (length, 2))))
        other.requires_grad_(draw.random() < 0.2)
        x, y = (other, batches) if left else (batches, other)
        with Seen() as calls:
            torch.matmul(x, y)
        assert _folds(x, y, is_out=False) == (torch.ops.aten.bmm.default not in calls.ops)
