"""Steps that are compiled with a second memory: what a person asks for, and what they are told."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate import HostError, InfeasibleBudget
from checkmate.core import files
from checkmate.core.simulator import simulate
from checkmate.host import opening
from checkmate.memory import measure_peak
from checkmate.solvers.background_search import News
from tests.support.bits import assert_same_bits
from tests.support.offers import offered
from tests.support.stepping import assert_same, train
from tests.support.transfers import as_run, with_transfers

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = 0.4  # to plan


class Net(nn.Module):
    """Dropout and batch norm, and values that are cheap to send for their bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(4))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.body:
            x = x + self.drop(layer(x))
        return F.cross_entropy(self.head(x), y)


def batch(size: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(8, (size,), generator=generator)


@functools.cache
def least() -> int:
    """The smallest budget without a second memory, about."""
    return checkmate.min_budget(checkmate.trace(Net(), *batch()), time_limit=SECONDS).peak


@functools.cache
def below() -> int:
    """A budget that holds with a second memory only."""
    problem = checkmate.trace(Net(), *batch(), host_budget="100 MB", host="file:/dev/shm")
    return (checkmate.min_budget(problem, time_limit=SECONDS).peak + least()) // 2


def compiled(fn: Any) -> Any:
    asked: dict[str, Any] = {"budget": below(), "host_budget": "100 MB", "host": "file:/dev/shm"}
    return checkmate.compile(fn, time_limit=SECONDS, wait="best", **asked)


@pytest.mark.slow
def test_it_trains_below_what_recomputation_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of plain PyTorch, the bytes of the plan here and there, and the same plan in the next process."""
    budget = below()
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(opening, "_measured", {})
    with pytest.raises(InfeasibleBudget):
        checkmate.compile(Net(), budget=budget, time_limit=SECONDS)(*batch())
    plain = Net()
    expected = train(plain, plain, batch())
    model = compiled(Net())

    found = train(model, model, batch())

    assert_same(found, expected)
    (plan,) = model.plans
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    (use,) = model.memory().second_memories
    assert use.peak == simulate(plan.plan, plan.problem).host_peak > 0
    assert (use.where, use.calls, use.pending) == ("file:/dev/shm", 3, 0)
    assert "second memory" in str(model.memory())

    monkeypatch.setattr(opening, "_measured", {})  # as in another process
    again = compiled(Net())
    again(*batch()).backward()
    assert again.plans[0].plan == plan.plan
    assert again.plans[0].origin == "plan cache"


@pytest.mark.slow
def test_batches_of_several_sizes_and_validation_between_them() -> None:
    plain, model = Net(), compiled(Net())
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
    """Within a budget that holds with a second memory only."""
    there: dict[str, Any] = {"host_budget": "100 MB", "host": "file:/dev/shm"}

    def planned(model: Net, optimizer: torch.optim.Optimizer, budget: int, **options: Any) -> checkmate.TrainingStep:
        about: dict[str, Any] = {"clip_norm": 1.0, "accumulate": 2, "time_limit": SECONDS, "wait": "best"}
        return checkmate.training_step(model, optimizer, budget=budget, **about, **options)

    def smallest(**options: Any) -> int:
        model = Net()
        step = planned(model, torch.optim.AdamW(model.parameters(), lr=0.01), 10**9)
        return checkmate.min_budget(checkmate.trace(step, *batch(), **options), time_limit=SECONDS).peak

    budget = (smallest() + smallest(**there)) // 2
    left = []
    for is_plain in (True, False):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        step = None if is_plain else planned(model, optimizer, budget, **there)
        for i in range(4):
            if step is not None:
                step(*batch(seed=i))
                continue
            if i % 2 == 0:
                optimizer.zero_grad()
            model(*batch(seed=i)).backward()
            if i % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        left.append((model.state_dict(), optimizer.state_dict()["state"]))
        if step is not None:
            assert all(plan.plan.sent for plan in step.plans)
            assert len(step.memory().second_memories) == 1
    assert_same_bits(*left)


@pytest.mark.slow
def test_a_plan_that_sends_takes_over_between_two_steps() -> None:
    plain, model = Net(), Net()
    most = checkmate.trace(plain, *batch()).keep_all_peak
    with offered() as searches:
        step = checkmate.compile(model, budget=most, host_budget="100 MB", host="file:/dev/shm", memory="allocator")
        left = []
        for one, run in ((plain, plain), (model, step)):
            torch.manual_seed(1)
            for i in range(3):
                run(*batch(seed=i)).backward()
                for search in searches:
                    begun = search.unfinished.start
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
    report = checkmate.verify(
        Net(), *batch(), budget=below(), time_limit=SECONDS, host_budget="100 MB", host="file:/dev/shm"
    )
    assert report.measured_peak == report.predicted_peak


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"host": "file:"}, ValueError, "say how many bytes"),
        ({"host_budget": "1 GB", "host": "/fast/disk"}, ValueError, "Unknown second memory '/fast/disk'"),
        ({"host_budget": "much"}, checkmate.BudgetError, "much"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        checkmate.compile(Net(), budget="1 GB", **options)


@pytest.mark.parametrize("where", ["file:/no/such/folder", "pinned"])
def test_where_there_is_no_such_memory(where: str) -> None:
    model = checkmate.compile(Net(), budget="1 GB", host_budget="1 GB", host=where)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(HostError, match="/no/such/folder" if where.startswith("file") else "CUDA"):
        model(*batch())
    assert_same_bits(dict(model.state_dict()), before)
