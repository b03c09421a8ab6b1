"""Steps that are compiled with a second memory: what a person asks for, and what they are told."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.core import files
from checkmate.core.simulator import simulate
from checkmate.errors import HostError, InfeasibleBudget
from checkmate.host import opening
from checkmate.memory import measure_peak
from checkmate.solvers.background_search import News
from tests.support.bits import assert_same_bits
from tests.support.offers import offered
from tests.support.stepping import assert_same, train
from tests.support.transfers import as_run, with_transfers
from tests.support.whole_steps import Scored, adamw, assert_as_plain, classifier, itself, planned_step, training

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = 0.4  # to plan
THERE: dict[str, Any] = {"host_budget": "100 MB", "host": "file:/dev/shm"}


def net() -> nn.Module:
    """Dropout and batch norm, and values that are cheap to send for their bytes."""
    return Scored(*classifier(blocks=4))


def batch(size: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(8, (size,), generator=generator)


def below(step: Any) -> int:
    """A budget that holds with a second memory only."""
    problems = checkmate.trace(step, *batch()), checkmate.trace(step, *batch(), **THERE)
    return sum(checkmate.min_budget(problem, time_limit=SECONDS).peak for problem in problems) // 2


@functools.cache
def budget_of_net() -> int:
    return below(net())


def compiled(fn: Any) -> Any:
    return checkmate.compile(fn, budget=budget_of_net(), time_limit=SECONDS, wait="best", **THERE)


@pytest.mark.slow
def test_it_trains_below_what_recomputation_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of plain PyTorch, the bytes of the plan here and there, and the same plan in the next process."""
    budget = budget_of_net()
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(opening, "_measured", {})
    with pytest.raises(InfeasibleBudget):
        checkmate.compile(net(), budget=budget, time_limit=SECONDS)(*batch())
    plain = net()
    expected = train(plain, plain, batch())
    model = compiled(net())

    found = train(model, model, batch())

    assert_same(found, expected)
    (plan,) = model.plans
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    (use,) = model.memory().second_memories
    assert use.peak == simulate(plan.plan, plan.problem).host_peak > 0
    assert (use.where, use.calls, use.pending) == ("file:/dev/shm", 3, 0)
    assert "second memory" in str(model.memory())

    monkeypatch.setattr(opening, "_measured", {})  # as in another process
    again = compiled(net())
    again(*batch()).backward()
    assert again.plans[0].plan == plan.plan
    assert again.plans[0].origin == "plan cache"


@pytest.mark.slow
def test_batches_of_several_sizes_and_validation_between_them() -> None:
    plain, model = net(), compiled(net())
    left = []
    for one in (plain, model):
        torch.manual_seed(1)
        seen = []
        for i, size in enumerate((512, 300, 512)):
            one(*batch(size, i)).backward()
            with torch.no_grad():
                seen.append(one(*batch(100, i)))
        left.append((seen, [p.grad for p in one.parameters()], one.state_dict()))
    assert_same_bits(*left)
    assert len(model.plans) == 2


@pytest.mark.slow
def test_whole_steps_with_gradients_that_are_accumulated() -> None:
    """The budget holds with a second memory only."""
    how: dict[str, Any] = {"clip_norm": 1.0, "accumulate": 2}
    budget = below(planned_step(model := net(), adamw(model), **how))
    train = training(net, loss=itself, batch=lambda i: batch(seed=i), steps=4, metered=False, **how)
    step, _ = assert_as_plain(train, budget=budget, time_limit=SECONDS, **THERE)
    assert all(plan.plan.sent for plan in step.plans)
    assert len(step.memory().second_memories) == 1


@pytest.mark.slow
def test_a_plan_that_sends_takes_over_between_two_steps() -> None:
    plain, model = net(), net()
    most = checkmate.trace(plain, *batch()).keep_all_peak
    with offered() as searches:
        step = checkmate.compile(model, budget=most, memory="allocator", **THERE)
        left = []
        for one, run in ((plain, plain), (model, step)):
            torch.manual_seed(1)
            for i in range(3):
                run(*batch(seed=i)).backward()
                for search in searches:
                    begun = search.query.start
                    sent = as_run(begun.problem, with_transfers(begun.problem, begun.plan, np.random.default_rng(i)))
                    search.news = search.better = News(begun.cost, 0.0, float(i), sent)
                left.append([p.grad for p in one.parameters()])
                one.zero_grad()
        assert_same_bits(left[3:], left[:3])
        assert step.planning[0].swaps == 2
        for search in searches:
            search.better = None
    given = batch()
    use = measure_peak(lambda: step(*given).backward())
    (plan,) = step.plans
    assert plan.plan.sent
    assert plan.problem.resident + use.peak == plan.peak
    assert step.memory().second_memories[0].peak == simulate(plan.plan, plan.problem).host_peak


@pytest.mark.slow
def test_it_is_verified() -> None:
    report = checkmate.verify(net(), *batch(), budget=budget_of_net(), time_limit=SECONDS, **THERE)
    assert report.measured_peak == report.predicted_peak


@pytest.mark.parametrize("where", ["file:/no/such/folder", "pinned"])
def test_where_there_is_no_such_memory(where: str) -> None:
    model = checkmate.compile(net(), budget="1 GB", host_budget="1 GB", host=where)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HostError, match="/no/such/folder" if where.startswith("file") else "CUDA"):
        model(*batch())
    assert_same_bits(model.state_dict(), before)
