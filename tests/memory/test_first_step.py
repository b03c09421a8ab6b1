"""A plan is held against what the first step by it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.memory import native
from checkmate.profiling import cost_cache
from checkmate.units import format_bytes


class Pooled(nn.Module):
    """Its first op takes much more memory than it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.logsumexp(1)).square().mean()


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.start()
    assert native.wait() is None  # an arena from the first step on
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_cache, "_known", {})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("stale", [False, True], ids=["costs that hold", "costs that do not"])
def test_a_step_that_takes_more_than_its_plan_says_so_and_its_ops_are_measured_anew(
    device: str, stale: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = Pooled().to(device), torch.randn(64, 1024, 64, device=device)
    conditions = cost_cache.conditions_on(torch.device(device))

    def kept() -> dict[str, cost_cache.OpCost]:
        costs = cost_cache.load(conditions)
        return {key: cost for key, cost in costs.items() if "aten.logsumexp" in key and cost is not None}

    def taken() -> int:
        problem = checkmate.trace(net, x)
        return problem.keep_all_peak - problem.resident

    right, known = taken(), kept()
    assert known
    if stale:
        cost_cache.store(conditions, {key: replace(cost, allocated_bytes=1) for key, cost in known.items()})
    monkeypatch.setattr(cost_cache, "_known", {})  # as in another process
    compiled = checkmate.compile(net, budget="1 GB", wait="best")
    for _ in range(3):
        compiled(x).backward()
    said = [message for message in caplog.messages if "than was measured before" in message]
    (plan,) = compiled.plans
    if not stale:
        assert said == []
        return
    assert plan.peak - plan.problem.resident < right
    (words,) = said
    assert f"where its plan takes {format_bytes(plan.peak)}: " in words
    assert not kept()
    assert taken() == right
