"""A method that has nothing to convert gives the tensor itself, with all that Python keeps with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class _Moving(nn.Module):
    """Moves its buffer to where the input is, in each call."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 3))
        self.table = nn.Buffer(torch.linspace(-1, 1, 3), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(device=x.device, dtype=x.dtype)
        return (self.scale * x * self.table).sum()


def _compiled(step: Any) -> Any:
    return checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_assigned_to_its_name_again_stays_what_it_is(persistent: bool) -> None:
    model, x = _Moving(persistent), torch.ones(3)
    table, keys = model.table, [*model.state_dict()]
    compiled = _compiled(model)
    for _ in range(2):
        assert_same_bits(compiled(x), _Moving(persistent)(x))
    assert model.table is table
    assert [*model.state_dict()] == keys
    assert len(compiled.plans) == 1


def test_what_is_converted_is_another_tensor() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        same = [x.float() is x, x.to("cpu") is x, x.contiguous() is x, x.double() is x, x.clone() is x]
        other = x.to(torch.float64, copy=True)
        return (weight * x.contiguous() * other).sum() * (1 + sum(2**i for i, it_is in enumerate(same) if it_is))

    weight = torch.linspace(1, 2, 6).view(2, 3).requires_grad_()
    compiled = _compiled(step)
    for x in (torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(-1, 1, 6).view(3, 2).T):
        assert_same_bits(compiled(x, weight), step(x, weight))
