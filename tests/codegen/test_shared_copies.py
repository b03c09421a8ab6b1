"""What is around a step in a region of autocast: the gradients of plain PyTorch, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits

Step = Callable[[Tensor], Tensor]
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))


def autocast(**options: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


@pytest.fixture
def plain(layer: nn.Linear) -> Step:
    return lambda x: layer(layer(x).relu()).sum()


@pytest.fixture
def step(plain: Step) -> Step:
    return checkmate.compile(plain, budget="1 GB", time_limit=1)


def _losses(first: Step, second: Step) -> tuple[Tensor, Tensor]:
    with autocast():
        return first(X), second(X * 2)


@pytest.mark.slow
def test_uses_of_a_weight_in_one_region(layer: nn.Linear, plain: Step, step: Step) -> None:
    def separately(first: Step, second: Step) -> Any:
        losses = _losses(first, second)
        return losses, [torch.autograd.grad(loss, [*layer.parameters()]) for loss in losses]

    expected = separately(plain, plain)
    for first, second in ((step, step), (step, plain), (plain, step)):
        assert_same_bits(separately(first, second), expected)
        for meet in (lambda a, b: (a + b).backward(), lambda a, b: torch.autograd.backward([a, b])):
            with pytest.raises(Unsupported, match=r"^weight is used by .* anew for each call"):
                meet(*_losses(first, second))


def test_regions_of_their_own_add_as_plain_pytorch_does(layer: nn.Linear, plain: Step, step: Step) -> None:
    def gradients(one: Step) -> Any:
        losses = [autocast()(one)(X * factor) for factor in (1, 2)]
        return torch.autograd.grad(losses[0] + losses[1], [*layer.parameters()])

    assert_same_bits(gradients(step), gradients(plain))


def test_a_weight_that_changes_in_the_region(layer: nn.Linear, plain: Step, step: Step) -> None:
    """Plain PyTorch goes on with the copy of the weight before the change."""
    for first, second in ((step, step), (step, plain), (plain, step)):
        with autocast():
            first(X)
            with torch.no_grad():
                layer.weight.mul_(1.5)
            with pytest.raises(Unsupported, match="weight was changed in a region of autocast"):
                second(X)


def test_without_gradients(layer: nn.Linear, plain: Step, step: Step) -> None:
    with autocast():
        step(X)
        with torch.no_grad():
            found = plain(X), step(X), layer(X)
    with autocast(), torch.no_grad():
        assert_same_bits(found, (plain(X), plain(X), layer(X)))


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_name")
def test_another_region_than_that_of_the_capture(layer: nn.Linear) -> None:
    """A region that is not enabled keeps the copies of those within it, and tells nobody."""

    def plain(x: Tensor) -> Tensor:
        with autocast():
            x = layer(x)
        with autocast():
            return (layer(x.float()) * layer(x)).sum()

    def gradients(one: Step, x: Tensor, *, within: bool) -> Any:
        with autocast(enabled=False) if within else nullcontext():
            loss = one(x)
        return torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)

    leaf = X.clone().requires_grad_()
    made = checkmate.compile(plain, budget="1 GB", time_limit=1)
    named = torch.compile(plain, backend="checkmate", options={"budget": "1 GB", "time_limit": 1}, dynamic=False)
    assert_same_bits(gradients(named, leaf, within=False), gradients(plain, leaf, within=False))
    for x in (leaf, leaf * 1):
        for within in (False, True):
            assert_same_bits(gradients(made, x, within=within), gradients(plain, x, within=within))
            if within or x is not leaf:
                with pytest.raises(Unsupported, match=r"or the other way round. checkmate\.compile captures"):
                    gradients(named, x, within=within)
