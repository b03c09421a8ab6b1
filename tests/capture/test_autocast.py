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

import checkmate
from tests.support.sampling import slow

BF16 = torch.bfloat16
QUICK = {"one region", "written between"}


autocast = partial(torch.autocast, "cpu", dtype=BF16)


class _Steps:
    """By what is special about their regions."""

    def one_region(layer: nn.Linear, x: Tensor, **options: Any) -> Tensor:
        with autocast(**options):
            return layer(layer(layer(x)).relu()).sum()

    in_float16 = partial(one_region, dtype=torch.float16)
    copies_not_kept = partial(one_region, cache_enabled=False)

    def two_regions(layer: nn.Linear, x: Tensor) -> Tensor:
        """Each converts anew."""
        with autocast():
            x = layer(layer(x))
        with autocast():
            return layer(layer(x.float())).sum()

    def regions_within(layer: nn.Linear, x: Tensor) -> Tensor:
        """The copies stay until the outermost one is left."""
        with autocast():
            x = layer(x)
            with autocast(enabled=False):
                x = layer(x.float())
                with autocast():
                    x = layer(x)
            return layer(x).sum()

    def off_around(layer: nn.Linear, x: Tensor) -> Tensor:
        """A region that is not enabled keeps the copies of those within it."""
        with autocast(enabled=False):
            with autocast():
                x = layer(x)
            with autocast():
                return layer(x.float()).sum()

    def first_without_gradients(layer: nn.Linear, x: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad():
                x = layer(x)
            return layer(layer(x)).sum()

    def written_between(layer: nn.Linear, x: Tensor) -> Tensor:
        """The second use computes with the copy of what was there."""
        with autocast():
            x = layer(x)
            with torch.no_grad():
                layer.weight.clamp_(-0.1, 0.1)
            return layer(x).sum() + layer.weight.float().sum()

    def by_hand_as_well(layer: nn.Linear, x: Tensor) -> Tensor:
        with autocast():
            return (layer(layer(x)) @ layer.weight.to(BF16) @ layer.weight.bfloat16()).sum()

    def not_a_leaf(layer: nn.Linear, x: Tensor) -> Tensor:
        """Of what is computed within the step no copy is kept."""
        with autocast():
            weight = layer.weight * 2
            return F.linear(F.linear(x, weight), weight).sum()

    def checkpointed(layer: nn.Linear, x: Tensor) -> Tensor:
        with autocast():
            x = layer(x)
            x = checkpoint(lambda x: layer(layer(x)).relu(), x, use_reentrant=False)
            return layer(x).sum()

    def written_through_data(layer: nn.Linear, x: Tensor) -> Tensor:
        """Of a weight that is converted once."""
        with autocast():
            layer.weight.data.clamp_(-0.1, 0.1)
            return F.linear(x, layer.weight).sum() + layer.weight.sum()

    def a_leaf_that_is_an_input(layer: nn.Linear, x: Tensor) -> Tensor:
        with autocast():
            return (layer(x) * F.linear(x, layer.bias.view(1, 8))).sum()


STEPS = {name.replace("_", " "): step for name, step in vars(_Steps).items() if name[0] != "_"}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in STEPS])
def test_the_bits_of_plain_pytorch(name: str) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    checkmate.verify(lambda x: STEPS[name](layer, x), x, budget="1 GB", time_limit=1)


@pytest.mark.slow
def test_a_region_around_the_step() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    for options in ({}, {"cache_enabled": False}, {"enabled": False}):
        with autocast(**options):
            assert (
                checkmate.verify(
                    lambda x: layer(layer(layer(x)).relu()).sum(), x, budget="1 GB", time_limit=1
                ).gradients
                == 2
            )


def test_a_weight_that_tracing_makes_another_one_of_is_converted_once_at_most() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)

    def step(x: Tensor) -> Tensor:
        with autocast():
            x = layer(x)
            layer.weight.data.clamp_(-0.1, 0.1)
            return layer(x).sum()

    with pytest.raises(checkmate.Unsupported, match=r"weight is used more than once.*and not through \.data"):
        checkmate.verify(step, x, budget="1 GB", time_limit=1)


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

    ops = (
        lambda: F.affine_grid(theta, [1, 1, 3, 3], align_corners=False),
        lambda: form(x, x),
        lambda: torch.linalg.pinv(x),
    )
    for op in ops:
        with pytest.raises(checkmate.Unsupported, match=r"test_autocast\.py:\d+: .*enabled=False"):
            checkmate.compile(step(True, op), budget="1 GB")(x)
        if not checkpointed:
            checkmate.verify(step(False, op), x, budget="1 GB", time_limit=1)
