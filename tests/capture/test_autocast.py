"""Weights that are used more than once under autocast: converted once within a region, as by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.plainly import assert_refused, verify_to_the_byte
from tests.support.sampling import slow

Step = Callable[[nn.Linear, Tensor], Tensor]
BF16 = torch.bfloat16
autocast = partial(torch.autocast, "cpu", dtype=BF16)


def _within(step: Step, **options: Any) -> Step:
    """The step within a region."""

    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        with autocast(**options):
            return step(layer, x)

    return run


def _thrice(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(layer(layer(x)).relu()).sum()


def _two_regions(layer: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        x = layer(layer(x))
    with autocast():
        return layer(layer(x.float())).sum()


def _regions_within(layer: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        x = layer(x)
        with autocast(enabled=False):
            x = layer(x.float())
            with autocast():
                x = layer(x)
        return layer(x).sum()


def _first_without_gradients(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = layer(x)
    return layer(layer(x)).sum()


def _written_between(layer: nn.Linear, x: Tensor) -> Tensor:
    x = layer(x)
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)
    return layer(x).sum() + layer.weight.float().sum()


def _checkpointed(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(checkpoint(lambda x: layer(layer(x)).relu(), layer(x), use_reentrant=False)).sum()


def _not_a_leaf(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight * 2
    return F.linear(F.linear(x, weight), weight).sum()


def _written_through_data(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.weight.data.clamp_(-0.1, 0.1)
    return F.linear(x, layer.weight).sum() + layer.weight.sum()


STEPS: dict[str, Step] = {
    "one region": _within(_thrice),
    "in float16": _within(_thrice, dtype=torch.float16),
    "copies not kept": _within(_thrice, cache_enabled=False),
    "two regions": _two_regions,  # each converts anew
    "regions within": _regions_within,  # copies stay until the outermost one is left
    "off around": _within(_two_regions, enabled=False),  # keeps the copies of those within it
    "first without gradients": _within(_first_without_gradients),
    "written between": _within(_written_between),  # the second use computes with the copy of what was there
    "by hand as well": _within(
        lambda layer, x: (layer(layer(x)) @ layer.weight.to(BF16) @ layer.weight.bfloat16()).sum()
    ),
    "not a leaf": _within(_not_a_leaf),  # of what the step computes no copy is kept
    "checkpointed": _within(_checkpointed),
    "written through data": _within(_written_through_data),  # a weight that is converted once
    "a leaf that is an input": _within(lambda layer, x: (layer(x) * F.linear(x, layer.bias.view(1, 8))).sum()),
}
QUICK = ("one region", "written between")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in STEPS])
def test_the_bits_of_plain_pytorch(name: str) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    verify_to_the_byte(partial(STEPS[name], layer), x, budget="1 GB")


@pytest.mark.slow
def test_a_region_around_the_step() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    for options in ({}, {"cache_enabled": False}, {"enabled": False}):
        with autocast(**options):
            assert verify_to_the_byte(partial(_thrice, layer), x, budget="1 GB").gradients == 2


def test_a_weight_that_tracing_makes_another_one_of_is_converted_once_at_most() -> None:
    layer = nn.Linear(8, 8)

    def step(x: Tensor) -> Tensor:
        with autocast():
            x = layer(x)
            layer.weight.data.clamp_(-0.1, 0.1)
            return layer(x).sum()

    assert_refused(step, torch.randn(3, 8), words=r"weight is used more than once.*and not through \.data")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_ops_that_multiply_matrices_within_are_refused(checkpointed: bool) -> None:
    """Plain PyTorch's autocast changes what their kernels call. Where it is off they are captured."""
    theta, form, x = torch.randn(1, 2, 3, requires_grad=True), nn.Bilinear(8, 8, 2), torch.randn(3, 8)

    def step(enabled: bool, op: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with autocast():
                y = theta.flatten() @ theta.flatten()
                with autocast(enabled=enabled):
                    made = checkpoint(op, use_reentrant=False) if checkpointed else op()
                return made.float().square().sum() + y

        return run

    for op in (
        lambda: F.affine_grid(theta, [1, 1, 3, 3], align_corners=False),
        lambda: form(x, x),
        lambda: torch.linalg.pinv(x),
    ):
        assert_refused(step(True, op), x, words=r"test_autocast\.py:\d+: .*enabled=False")
        if not checkpointed:
            verify_to_the_byte(step(False, op), x, budget="1 GB")
