"""Training under autocast with weights that are used more than once: the bits of plain PyTorch after several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from tests.support.sampling import long
from tests.support.stepping import assert_same, train
from tests.support.whole_steps import assert_as_plain, loss_of, training

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def shared() -> nn.Module:
    """Two blocks of the same weights."""
    torch.manual_seed(0)
    block = nn.Linear(16, 16)
    return nn.Sequential(block, nn.GELU(), block, nn.GELU(), nn.Linear(16, 4))


def _smallest(step: Any) -> int:
    return checkmate.min_budget(checkmate.trace(step, *BATCH, profile="roofline:h100"), time_limit=1).peak


@pytest.mark.usefixtures("found_by_name")
def test_compiled_steps() -> None:
    def trained(compiled: Any) -> Any:
        model = shared()
        return train(model, compiled(loss_of(model, torch.bfloat16)), BATCH)

    expected = trained(lambda loss_fn: loss_fn)
    options = {"budget": _smallest(loss_of(shared(), torch.bfloat16)), "time_limit": 1}
    assert_same(trained(lambda loss_fn: checkmate.compile(loss_fn, **options)), expected)
    by_name = {"backend": "checkmate", "options": options, "dynamic": False}
    assert_same(trained(lambda loss_fn: torch.compile(loss_fn, **by_name)), expected)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        long(torch.bfloat16, {"clip_norm": 0.1, "accumulate": 2}),
        (torch.float16, {"clip_norm": 0.1, "scaler": lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**8)}),
    ],
)
def test_whole_steps(dtype: torch.dtype, options: dict[str, Any]) -> None:
    train: Any = training(shared, loss=lambda model: loss_of(model, dtype), batch=BATCH, steps=4, **options)
    step, _ = assert_as_plain(train)
    assert_as_plain(train, budget=_smallest(step))
