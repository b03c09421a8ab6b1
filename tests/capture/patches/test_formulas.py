"""Gradients whose formula eager PyTorch chooses by the data have the bits of the one that it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import checkmate
from tests.support.plainly import assert_as_plain, compiled
from tests.support.sampling import every

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: -x.max(),
    "max of a transposed": lambda x: (-3 * x.t().max()).sin(),
    "min": lambda x: x.min().sin(),
    "median": lambda x: -x.median(),
    "nanmedian": lambda x: -x.nanmedian(),
    "prod": lambda x: x.prod().sin(),
    "prod along": lambda x: x.prod(1).sin().sum(),
    "prod kept": lambda x: x.t().prod(-1, True).sin().sum(),
    "prod in double precision": lambda x: x.prod(0, dtype=torch.float64).sin().sum(),
    "of integers": lambda x: x.sum() * (x > 0.5).int().max(),
    "scaled": lambda x: (x / x.abs().max() * 127).round().sum() + x.square().sum(),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "a zero": lambda x: x.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(0.0)),
    "zeros in a row": lambda x: x.index_put((torch.tensor([2, 2]), torch.tensor([3, 5])), torch.tensor(0.0)),
    "ties": lambda x: x.index_put((torch.tensor([1, 4]), torch.tensor([1, 4])), x.max()).clamp(min=-0.5),
    "no number": lambda x: x.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan"))),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", every(4, STEPS))
def test_same_bits_as_eager(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return STEPS[name](x * 1.5)

    drawn = torch.randn(6, 7)
    problem = checkmate.trace(step, drawn.clone().requires_grad_(), profile="roofline:h100")
    run = compiled(step, budget=checkmate.min_budget(problem, time_limit=1).peak)
    for change in CHANGES.values():
        assert_as_plain(step, change(drawn.clone()).requires_grad_(), run=run)
    assert len(run.plans) == 1


def test_the_gradient_is_one_op_that_is_measured() -> None:
    ops = checkmate.trace(lambda x: x.max() + x.prod(), torch.randn(5, 5, requires_grad=True)).graph.ops
    assert [op.target for op in ops].count("checkmate.gradient.default") == 2


def test_pytorch_keeps_its_own_formulas() -> None:
    before = dict(torch.ops.aten.prod.dim_int.py_kernels)
    checkmate.trace(lambda x: x.prod(1).sum(), torch.randn(5, 5, requires_grad=True))
    assert dict(torch.ops.aten.prod.dim_int.py_kernels) == before
