"""A loss in parts has the bits of the whole, without a buffer of the size of its logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checkmate.capture.loss.kernels import (
    CAST,
    Form,
    Layer,
    gradient_of_rows,
    gradients_of_weights,
    length,
    one_class,
    row_sums,
)
from checkmate.memory import measure_peak
from tests.capture.loss.products import OneOrder
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn, long

aten = torch.ops.aten
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _in_parts(
    h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, dtype: torch.dtype, parts: int, how: int, *, kept: bool = False
) -> list[Any]:
    """The loss, and the gradients that its sum has."""
    there, back = (((CAST, to),) if dtype != h.dtype else () for to in (dtype, h.dtype))
    form = Form(-100, dtype, there, back, False, parts)
    layer = Layer(h, w.t(), b, y, F.linear(h, w, b) if kept else None)
    sums = row_sums(layer, form)
    column, targets = sums[0][:, None], one_class(y, -100)
    loss, total = aten.nll_loss_forward(column, targets, None, how, -100)
    g = aten.nll_loss_backward(torch.ones_like(loss), column, targets, None, how, -100, total)
    dh = gradient_of_rows(layer, form, g, None, sums, w)
    dw, *db = gradients_of_weights(layer, form, g, None, sums, True, b is not None)
    return [loss, dh, dw, *(bias.view(-1) for bias in db)]


@pytest.mark.slow
@in_turn(dtype=[torch.float32, torch.bfloat16], upcast=[False, True], seed=[0, *map(long, range(1, 6))])
def test_random_losses_have_the_bits_of_plain_pytorch(
    dtype: torch.dtype, upcast: bool, seed: int, threads: int
) -> None:
    """If its products have them: those of some processors have not, in some shapes, which a trial finds."""
    draw = random.Random(f"{dtype} {upcast} {seed}")
    rows, depth, classes = draw.choice([64, 127, 200, 513]), draw.choice([24, 64, 100]), draw.choice([101, 1000, 3001])
    parts, how, scale = draw.choice([2, 4, 16]), draw.choice(list(REDUCTIONS)), draw.choice([0.1, 3.0])
    torch.manual_seed(seed)
    h, w = torch.randn(rows, depth).to(dtype), (scale * torch.randn(classes, depth)).to(dtype)
    b = torch.randn(classes).to(dtype) if draw.random() < 0.5 else None
    y = torch.randint(classes, (rows,))
    y[: rows // 3 : 2] = -100
    leaves = [tensor.clone().requires_grad_() for tensor in (h, w, b) if tensor is not None]
    kept = draw.random() < 0.5
    with OneOrder():
        logits = F.linear(*leaves)
        loss = F.cross_entropy(logits.float() if upcast else logits, y, reduction=how)
        grads = torch.autograd.grad(loss.sum(), leaves)
        made = _in_parts(h, w, b, y, torch.float32 if upcast else dtype, parts, REDUCTIONS[how], kept=kept)
    assert_same_bits(made, [loss.detach(), *grads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_buffer_is_as_large_as_the_logits(dtype: torch.dtype) -> None:
    rows, depth, classes = 256, 16, 4096
    h, w, y = torch.randn(rows, depth).to(dtype), torch.randn(classes, depth).to(dtype), torch.zeros(rows).long()
    logits, grown = rows * classes * dtype.itemsize, (rows + classes) * depth * dtype.itemsize
    assert measure_peak(lambda: F.linear(h, w)).peak >= logits
    peaks = [
        measure_peak(lambda: _in_parts(h, w, None, y, dtype, parts, 1)).peak  # noqa: B023  # called at once
        for parts in (1, 8, 32)
    ]
    assert peaks[0] > 2 * logits
    logits *= 4 // dtype.itemsize  # the kernel of the gradient has a buffer in float32
    assert peaks[1] < 0.4 * logits + grown
    assert peaks[2] < 0.2 * logits + grown


def test_targets_out_of_range_are_an_error_as_in_plain_pytorch() -> None:
    h, w = torch.randn(4, 3), torch.randn(5, 3)
    for wrong in (5, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            row_sums(Layer(h, w.t(), None, torch.tensor([0, 1, wrong, 2])), Form(-100, torch.float32, (), (), False, 2))


def test_parts_are_multiples_and_no_longer_than_the_whole() -> None:
    assert [length(100, parts, 16) for parts in (1, 2, 4, 64)] == [100, 64, 32, 16]
    assert length(10, 4, 16) == 10
