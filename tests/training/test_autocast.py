"""Training under autocast with weights that are used more than once: the bits of plain PyTorch after several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.sampling import long
from tests.support.stepping import assert_same, train
from tests.support.whole_steps import assert_as_plain, planned_step, train_whole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


class Shared(nn.Module):
    """Two blocks of the same weights, and the loss."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.dtype = nn.Linear(16, 16), nn.Linear(16, 4), dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            for _ in range(2):
                x = F.gelu(self.block(x))
            return F.cross_entropy(self.head(x).float(), y)


def _smallest(step: Any) -> int:
    return checkmate.min_budget(checkmate.trace(step, *BATCH, profile="roofline:h100"), time_limit=1).peak


@pytest.mark.usefixtures("found_by_name")
def test_compiled_steps() -> None:
    model, plain = Shared(), Shared()
    expected, budget = train(plain, plain, BATCH), _smallest(model)
    assert_same(train(model, checkmate.compile(model, budget=budget, time_limit=1), BATCH), expected)
    model = Shared()
    options = {"budget": budget, "time_limit": 1}
    assert_same(
        train(model, torch.compile(model, backend="checkmate", options=options, dynamic=False), BATCH), expected
    )


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        long(torch.bfloat16, {"clip_norm": 0.1, "accumulate": 2}),
        (torch.float16, {"clip_norm": 0.1}),
    ],
)
def test_whole_steps(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In float16 with a scaled loss."""

    def made(make: Callable[..., Any]) -> tuple[Any, ...]:
        model = Shared(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if dtype == torch.float16 else None
        return make(model, optimizer, scaler=scaler, **options), model, [optimizer]

    smallest = _smallest(made(planned_step)[0])
    assert_as_plain(lambda make: train_whole(*made(make), BATCH, steps=4), budget=smallest)
