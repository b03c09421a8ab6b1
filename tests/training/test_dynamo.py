"""The backend of `torch.compile`, found by its name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.sampling import in_turn
from tests.support.stepping import assert_same, train
from tests.support.whole_steps import X, Y, classifier, loss_of

pytestmark = pytest.mark.usefixtures("found_by_name", "one_thread")


def _compiled(step: Any, **options: Any) -> Any:
    return torch.compile(step, backend="checkmate", options=options, dynamic=False)


@pytest.mark.slow
def test_trains_within_the_budget_in_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    net, twin = classifier(), classifier()
    problem = checkmate.trace(loss_of(net), X, Y)
    smallest = recomputing(problem)
    compiled = _compiled(loss_of(net), budget=smallest, time_limit=1)
    with caplog.at_level(logging.INFO, logger="checkmate.dynamo"):
        found = train(net, compiled, (X, Y))
    assert_same(found, train(twin, loss_of(twin), (X, Y)))
    assert all(problem.resident + peak <= smallest for peak in found.peaks)
    assert "runs again" in caplog.text


@pytest.mark.slow
def test_another_shape_gets_its_own_plan() -> None:
    net = classifier().eval()
    compiled = _compiled(net, budget="1 MB")
    for size in (64, 7, 5):
        assert_same_bits(compiled(X[:size]), net(X[:size]))


@in_turn(
    case=[
        ({"options": {"budget": "fits"}}, "Cannot read the budget 'fits'"),
        ({"options": {"budget": "170%"}}, "100% at most"),
        ({"options": {"budget": "1 kB"}}, "Smallest budget that works"),
        ({"options": {"budget": "1 MB", "speed": 3}}, "no option 'speed'. Its options are budget, method, time_limit,"),
        ({"options": {"budgt": "1 MB"}}, "has no option 'budgt'. Did you mean 'budget'?"),
        ({"options": {"budget": "1 MB", "time_limit": "60s"}}, "time_limit is a positive number of .*, not '60s'."),
        ({"options": {"budget": "1 MB", "rules": {"nothing": "keep"}}}, "names nothing in this step"),
        ({"options": {"budget": "1 MB", "verify": True}}, "verify=True"),
        ({"options": {"budget": "1 MB"}, "dynamic": True}, "dynamic=False"),
        ({"mode": "reduce-overhead"}, "no modes"),
    ]
)
def test_what_is_wrong_is_said(case: tuple[dict[str, Any], str]) -> None:
    about, words = case
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        torch.compile(classifier(), backend="checkmate", **{"dynamic": False, **about})(X)


def test_a_step_that_breaks_in_two_is_refused() -> None:
    net = classifier()

    def breaking(x: Tensor) -> Tensor:
        y = net(x)
        torch._dynamo.graph_break()
        return y.square().sum()

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="fullgraph=True"):
        _compiled(breaking, budget="1 MB")(X)
