"""What a known mask selects, in the bits of plain PyTorch, with a plan for each number of elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import checkmate
from tests.support.plainly import assert_as_plain

pytestmark = pytest.mark.usefixtures("forgotten")
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def _adapters(x: Tensor, kinds: Tensor) -> Tensor:
    """Each row is transformed by what its kind says; there may be none of a kind."""
    x = x @ WEIGHT
    out = torch.zeros_like(x)
    for kind in range(2):
        mask = kinds == kind
        out[mask] = (x[mask] @ WEIGHT).tanh()
    return (out + x).square().sum()


def _edges(x: Tensor, kinds: Tensor) -> Tensor:
    """Pairs of different kinds, as columns of places, and what `masked_select`, `nonzero` and `where` say of them.

    Edges of graph networks are such pairs, to which one of each node with itself is added.
    """
    pairs = torch.stack([kinds, kinds.roll(1)])
    kept = torch.cat([pairs[:, pairs[0] != pairs[1]], torch.arange(5).expand(2, -1)], 1)
    degree = torch.zeros(5).scatter_add_(0, kept[1], torch.ones(kept.shape[1]))
    (places,) = torch.where(kinds > 0)
    chosen = kinds.masked_select(kinds > 0)
    y = torch.zeros(5, 4).index_add_(0, kept[1], (x @ WEIGHT)[kept[0]] * degree[kept[0]][:, None]) * x
    return y.square().sum() + (x @ WEIGHT)[places].sin().sum() * chosen.sum() + x[kinds.nonzero()[:, 0]].mean()


BATCHES = ([0, 1, 1, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 1])


def _written(x: Tensor, kinds: Tensor) -> Tensor:
    """A mask of any number is one plan where it can be."""
    y = x @ WEIGHT
    y[kinds > 0] = WEIGHT[0]
    return y.square().sum()


@pytest.mark.parametrize(("step", "plans"), [(_adapters, 2), (_edges, 3), (_written, 1)])
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor, Tensor], Tensor], plans: int) -> None:
    run = checkmate.compile(step, budget="1 MB", time_limit=0.3)
    for kinds in BATCHES:
        x = torch.randn(5, 4, requires_grad=True)
        assert_as_plain(step, x, torch.tensor(kinds), run=run, leaves=[WEIGHT])
    assert len(run.plans) == plans
