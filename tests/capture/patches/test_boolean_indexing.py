"""What a known mask selects, in the bits of plain PyTorch, with a plan for each number of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits

WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


@pytest.fixture(autouse=True)
def _forgotten(one_thread: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _adapters(x: Tensor, kinds: Tensor) -> Tensor:
    """Each row is transformed by what its kind says; there may be none of a kind."""
    x = x @ WEIGHT
    out = torch.zeros_like(x)
    for kind in range(2):
        mask = kinds == kind
        out[mask] = (x[mask] @ WEIGHT).tanh()
    return (out + x).square().sum()


def _edges(x: Tensor, kinds: Tensor) -> Tensor:
    """Pairs of different kinds, as columns of places, and what `masked_select`, `nonzero` and `where` say of them."""
    pairs = torch.stack([kinds, kinds.roll(1)])
    kept = pairs[:, pairs[0] != pairs[1]]
    (places,) = torch.where(kinds > 0)
    chosen = kinds.masked_select(kinds > 0)
    y = (x @ WEIGHT)[kept[0]] * x[kept[1]]
    return y.square().sum() + (x @ WEIGHT)[places].sin().sum() * chosen.sum() + x[kinds.nonzero()[:, 0]].mean()


BATCHES = ([0, 1, 1, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 1])


@pytest.mark.parametrize(("step", "plans"), [(_adapters, 2), (_edges, 3)])
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor, Tensor], Tensor], plans: int) -> None:
    def train(run: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
        torch.manual_seed(0)
        for kinds in BATCHES:
            x = torch.randn(5, 4, requires_grad=True)
            yield from torch.autograd.grad(run(x, torch.tensor(kinds)), [x, WEIGHT])
        yield torch.get_rng_state()

    expected = [*train(step)]
    compiled = checkmate.compile(step, budget="1 MB", time_limit=0.3)

    assert_same_bits([*train(compiled)], expected)
    assert len(compiled.plans) == plans


def test_a_mask_of_any_number_is_one_plan_where_it_can_be() -> None:
    def step(x: Tensor, kinds: Tensor) -> Tensor:
        y = x @ WEIGHT
        y[kinds > 0] = WEIGHT[0]
        return y.square().sum()

    compiled = checkmate.compile(step, budget="1 MB", time_limit=0.3)
    for kinds in BATCHES:
        compiled(torch.ones(5, 4), torch.tensor(kinds)).backward()
    assert len(compiled.plans) == 1


@pytest.mark.parametrize("mask", [lambda x: (x @ WEIGHT)[:, 0] > 0, lambda x: torch.rand(len(x)) < 0.5])
def test_a_mask_of_activations_and_one_of_draws_are_refused(mask: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Unsupported, match=r"the size of \w+ depends on data"):
        checkmate.compile(lambda x: (x[mask(x)] @ WEIGHT).square().sum(), budget="1 MB")(torch.ones(5, 4))
