"""The backend of `torch.compile`, found by its name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.stepping import assert_same, train

pytestmark = pytest.mark.usefixtures("found_by_name", "one_thread")


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 16), torch.randint(4, (64,))


def _step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def _compiled(step: Any, **options: Any) -> Any:
    return torch.compile(step, backend="checkmate", options=options, dynamic=False)


@pytest.mark.slow
def test_trains_within_the_budget_in_the_same_bits(
    net: nn.Module, batch: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    twin = copy.deepcopy(net)
    problem = checkmate.trace(_step(net), *batch)
    smallest = recomputing(problem)
    compiled = _compiled(_step(net), budget=smallest, time_limit=1)
    with caplog.at_level(logging.INFO, logger="checkmate.dynamo"):
        found = train(net, compiled, batch)
    assert_same(found, train(twin, _step(twin), batch))
    assert all(problem.resident + peak <= smallest for peak in found.peaks)
    assert "runs again" in caplog.text


@pytest.mark.slow
def test_another_shape_gets_its_own_plan(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    compiled = _compiled(net.eval(), budget="1 MB")
    for size in (64, 7, 5):
        assert_same_bits(compiled(batch[0][:size]), net(batch[0][:size]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "fits"}, "Cannot read the budget 'fits'"),
        ({"budget": "170%"}, "100% at most"),
        ({"budget": "much"}, "much"),
        ({"budget": "1 kB"}, "Smallest budget that works"),
        ({"budget": "1 MB", "speed": 3}, "has no option 'speed'. Its options are budget, method, time_limit,"),
        ({"budgt": "1 MB"}, "has no option 'budgt'. Did you mean 'budget'?"),
        ({"budget": "1 MB", "time_limit": "60s"}, "time_limit is a positive number of seconds, not '60s'."),
        ({"budget": "1 MB", "verify": True}, "verify=True"),
    ],
)
def test_what_is_wrong_is_said(
    options: dict[str, Any], words: str, net: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        _compiled(net, **options)(batch[0])


def test_modes_are_refused(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(net, backend="checkmate", mode="reduce-overhead")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no modes"):
        compiled(batch[0])


def test_a_step_that_breaks_in_two_is_refused(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    def breaking(x: Tensor) -> Tensor:
        y = net(x)
        torch._dynamo.graph_break()
        return y.square().sum()

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="fullgraph=True"):
        _compiled(breaking, budget="1 MB")(batch[0])


def test_open_sizes_are_refused(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(net, backend="checkmate", options={"budget": "1 MB"}, dynamic=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="dynamic=False"):
        compiled(batch[0])
