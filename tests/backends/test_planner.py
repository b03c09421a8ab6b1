"""Budgets that name no bytes: what there is where a step runs, found when it first plans; `Planner` has other files."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from checkmate.backends import compilation
from checkmate.errors import BudgetError, InfeasibleBudget
from checkmate.memory.available import Available, Limit, rounded_down
from checkmate.units import exact_bytes, format_bytes
from tests.support.plainly import assert_as_plain
from tests.support.sampling import in_turn

ROWS, WIDE = 512, 64


class There:
    """A made-up machine: the bytes that are free, and what was asked of it."""

    def __init__(self) -> None:
        self.free, self.asked = 10**9, list[dict[str, Any]]()

    def __call__(self, device: torch.device, held: int, **about: Any) -> Available:
        self.asked.append({"device": device, "held": held, **about})
        return Available(Limit("this machine", 2 * 10**9, self.free), held, 1000)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> There:
    made = There()
    monkeypatch.setattr(compilation, "available", made)
    return made


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = (part for _ in range(4) for part in (nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(0.1)))
        self.net = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def batch(rows: int = ROWS) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDE).reshape(rows, WIDE)


def bytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


@in_turn(
    budget=("fits", "-5%", "120%", "%", 0.7, "", "0%"),
    way_in=(
        lambda loss, budget: checkmate.compile(loss, budget=budget),
        lambda loss, budget: checkmate.training_step(loss, torch.optim.SGD(loss.parameters()), budget=budget),
        lambda loss, budget: checkmate.verify(loss, batch(), budget=budget),
    ),
)
def test_what_is_no_budget_is_refused_at_once(budget: Any, way_in: Callable[..., Any], there: There) -> None:
    with pytest.raises(BudgetError, match="70%"):
        way_in(Loss(), budget)
    assert there.asked == []


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{}, {"budget": "fit"}, {"budget": "70%"}])
def test_a_step_takes_what_there_is_when_it_first_plans(
    asked: dict[str, Any], there: There, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks once: what is free later changes nothing. A step that fits runs nothing again."""
    step = checkmate.compile(loss := Loss(), **asked)
    assert there.asked == []
    with caplog.at_level(logging.INFO, logger="checkmate.backends.planner"):
        step(batch()).backward()
        there.free = 10
        step(batch(7)).backward()
    held, state = bytes_of(loss) + batch().nbytes, 2 * bytes_of(loss)
    assert [(one["device"].type, one["held"], one["sharing"]) for one in there.asked] == [("cpu", held, 1)]
    total = rounded_down(int((0.7 if asked == {"budget": "70%"} else 1) * (10**9 + held - 1000)))
    assert [plan.budget for plan in step.plans] == [total - state] * 2
    assert all(plan.schedule.recomputed.sum() == 0 for plan in step.plans)
    (line,) = caplog.messages
    share = "70% of what there is" if asked == {"budget": "70%"} else "what there is"
    assert line.startswith(f"The budget is {share}, {format_bytes(total)} ({total:_} bytes): this machine has")
    assert "1.00 kB are left as a margin" in line
    assert f"{format_bytes(state)} of it are reserved for an optimizer" in line


def test_where_the_step_does_not_fit_as_it_is_ops_run_again_with_the_same_bits(there: There) -> None:
    loss, x = Loss(), batch()
    problem = checkmate.trace(loss, x)
    least = checkmate.min_budget(problem, time_limit=1).peak
    there.free = (least + problem.keep_all_peak) // 2 - problem.resident
    step = checkmate.compile(loss, reserve=0, time_limit=1)
    assert_as_plain(loss, x, leaves=[*loss.parameters()], run=step)
    (plan,) = step.plans
    assert plan.schedule.recomputed.sum() > 0
    assert plan.peak <= plan.budget == rounded_down((least + problem.keep_all_peak) // 2 - 1000)


def test_a_refusal_names_what_there_is_and_what_others_hold(there: There) -> None:
    """It names the smallest budget, too: where that much is free, rounded down, the same step trains."""
    layer, x = nn.Linear(WIDE, WIDE), batch()
    for way_in, reserved in (
        (lambda: checkmate.compile(layer), True),
        (lambda: checkmate.training_step(lambda x: layer(x).sum(), torch.optim.SGD(layer.parameters())), False),
    ):
        there.free = 0
        with pytest.raises(InfeasibleBudget) as error:
            way_in()(x)
        said = str(error.value)
        assert "Smallest budget that works: " in said
        assert exact_bytes(error.value.min_budget) in said
        assert "The budget is what there is" in said
        assert "this machine has 2.00 GB, 2.00 GB of it are held by others" in said
        assert ("reserve= says how much" in said) == reserved
        there.free = error.value.min_budget * 65 // 64 + 1000
        way_in()(x)


def test_what_an_optimizer_may_come_to_hold_is_reserved_where_nothing_else_is_said(there: There) -> None:
    """Parameters that are trained count once each. A whole step, whose optimizer is in the plan, reserves nothing."""
    loss, x = Loss(), batch()
    loss.net[0].weight.requires_grad_(False)
    loss.net[6] = loss.net[3]
    trained = bytes_of(loss) - loss.net[0].weight.nbytes
    total = rounded_down(10**9 + bytes_of(loss) + x.nbytes - 1000)
    for options, reserved in (({}, 2 * trained), ({"reserve": 0}, 0), ({"reserve": "3 MB"}, 3 * 10**6)):
        step = checkmate.compile(loss, **options)
        step(x)
        assert step.plans[0].budget == total - reserved
    step = checkmate.training_step(loss, torch.optim.AdamW(loss.parameters()), accumulate=2)
    for _ in range(3):
        step(x)
    assert [plan.budget for plan in step.plans] == [total, total]
    assert len(there.asked) == 4


def test_a_state_that_is_there_is_held_by_the_step(there: There) -> None:
    loss, x = Loss(), batch()
    optimizer = torch.optim.AdamW(loss.parameters())
    checkmate.training_step(loss, optimizer)(x)
    checkmate.training_step(loss, optimizer)(x)
    before, after = (one["held"] for one in there.asked)
    assert after - before == sum(t.nbytes for of in optimizer.state.values() for t in of.values())


def test_a_copy_finds_its_own(there: There) -> None:
    step = checkmate.compile(Loss())
    step(batch())
    there.free = 10**8
    for other in (copy.deepcopy(step), copy.copy(step), pickle.loads(pickle.dumps(step))):
        other(batch())
        assert other.plans[0].budget < 2 * 10**8 < step.plans[0].budget


def test_what_serves_the_step_is_told(there: There) -> None:
    """An arena takes less of the machine than malloc does."""
    for memory, in_arena in ((None, True), ("allocator", False)):
        checkmate.compile(Loss(), memory=memory)(batch())
        assert there.asked.pop()["in_arena"] == in_arena


def test_without_data_nothing_says_what_there_is(there: There) -> None:
    nowhere = pytest.raises(BudgetError, match="Without data a step runs nowhere: name the bytes")
    with FakeTensorMode(), nowhere:
        checkmate.compile(Loss(), profile="roofline:h100")(torch.ones(ROWS, WIDE))
    assert there.asked == []


def test_bytes_that_are_named_are_not_looked_for(there: There) -> None:
    step = checkmate.compile(Loss(), budget="1 GB", reserve="100 MB")
    step(batch()).backward()
    assert step.plans[0].budget == 9 * 10**8
    with pytest.raises(InfeasibleBudget) as error:
        checkmate.compile(Loss(), budget=1000)(batch())
    assert "what there is" not in str(error.value)
    with pytest.raises(InfeasibleBudget, match=r"reserve of 2\.00 kB leaves nothing of") as error:
        checkmate.compile(Loss(), budget=1000, reserve=2000)(batch())
    assert f"Smallest budget that works: {exact_bytes(error.value.min_budget, up=True)}." in str(error.value)
    assert there.asked == []
