"""Weights that are used twice under autocast: the bits of plain PyTorch, or a refusal that says how to get them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import checkmate

BF16 = torch.bfloat16


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def _twice(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(layer(layer(x)).relu()).sum()


def _within(step: Callable[[Tensor], Tensor], **options: bool) -> Callable[[Tensor], Tensor]:
    def within(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16, **options):
            return step(x)

    return within


def _verify(step: Callable[[Tensor], Tensor]) -> checkmate.Certificate:
    return checkmate.verify(step, torch.randn(3, 8), budget="1 GB", time_limit=1)


def test_a_shared_weight_is_refused_where_its_copy_is_kept(layer: nn.Linear) -> None:
    words = r"Linear, test_autocast.py.*cache_enabled=False"
    with torch.autocast("cpu", dtype=BF16), pytest.raises(checkmate.Unsupported, match=words):
        _verify(_twice(layer))
    with pytest.raises(checkmate.Unsupported, match=words):
        _verify(_within(_twice(layer)))


def test_without_kept_copies_it_has_the_bits_of_plain_pytorch(layer: nn.Linear) -> None:
    """What the error advises."""
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        assert _verify(_twice(layer)).gradients == 2
    assert _verify(_within(_twice(layer), cache_enabled=False)).gradients == 2


@pytest.mark.slow
def test_weights_used_once_and_conversions_by_hand_are_no_obstacle(layer: nn.Linear) -> None:
    other = nn.Linear(8, 8)
    assert _verify(_within(lambda x: other(layer(x)).sum())).gradients == 4
    by_hand = lambda x: (x @ other.weight.to(BF16) @ other.weight.bfloat16()).sum()  # noqa: E731
    assert _verify(_within(by_hand)).gradients == 1
    assert _verify(lambda x: _twice(layer)(x)).gradients == 2
