"""One rank plans, the others follow; ranks are played one after the other here, with a real store between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.networks import dags
from checkmate.backends import ranks
from checkmate.core.problem import Problem
from checkmate.core.solution import Query, Solution, Status
from checkmate.errors import InvalidProblem, SolverError
from checkmate.solvers.solve import min_budget, solve

PROBLEM = dags.resnet((1, 1))
SMALLEST = min_budget(PROBLEM, time_limit=1).peak
BUDGET = (SMALLEST + PROBLEM.keep_all_peak) // 2
Ask = Callable[..., Solution]


class Planner:
    """Plans, and counts how often."""

    def __init__(self, problem: Problem, budget: int = BUDGET) -> None:
        self.problem, self.budget, self.calls = problem, budget, 0

    def __call__(self) -> Solution:
        self.calls += 1
        return solve(self.problem, self.budget, time_limit=1.0)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """``ask(rank, planner)``: what that rank gets."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks, "_store", lambda: store)

    def ask(rank: int, plan: Any, budget: int = BUDGET, method: str = "auto") -> Solution:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return ranks.one_plan(lambda query: plan())(Query(plan.problem, budget, method))

    return ask


def _with(**profile: Any) -> Problem:
    return replace(PROBLEM, profile=replace(PROBLEM.profile, **profile))


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_asks_first_plans_and_the_other_follows(ask: Ask, first: int, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks may measure other seconds."""
    planner, follower = Planner(PROBLEM), Planner(_with(seconds=PROBLEM.seconds * 1.3))
    planned = ask(first, planner)
    with caplog.at_level(logging.INFO, logger="checkmate.backends.ranks"):
        followed = ask(1 - first, follower)
    assert f"Rank {first} plans this step" in caplog.text
    assert (planner.calls, follower.calls) == (1, 0)
    assert np.array_equal(planned.schedule.R, followed.schedule.R)
    assert planned.schedule.recomputed.sum() > 0
    assert followed.plan == planned.plan
    for figure in ("cost", "bound", "peak", "status"):
        assert getattr(followed, figure) == getattr(planned, figure)
    assert followed.origin == f"rank {first}"


def test_who_asks_again_plans_again(ask: Ask) -> None:
    planners = [Planner(PROBLEM), Planner(PROBLEM)]
    for _ in range(2):
        for rank, planner in enumerate(planners):
            ask(rank, planner)
    assert [planner.calls for planner in planners] == [2, 0]


@pytest.mark.parametrize(
    ("problem", "budget", "method"),
    [
        (dags.resnet((1, 2)), BUDGET, "auto"),
        (_with(workspace_bytes=PROBLEM.workspace + 1), BUDGET, "auto"),
        (PROBLEM, BUDGET + 1, "auto"),
        (PROBLEM, BUDGET, "next-use"),
    ],
    ids=["ops", "bytes", "budget", "method"],
)
def test_ranks_with_other_questions_do_not_wait_for_each_other(
    ask: Ask, problem: Problem, budget: int, method: str
) -> None:
    """The stages of a pipeline, a smaller last batch, a step that only one rank takes."""
    planners = [Planner(PROBLEM), Planner(problem, problem.keep_all_peak)]
    ask(0, planners[0])
    ask(1, planners[1], budget, method)
    assert [planner.calls for planner in planners] == [1, 1]


def test_where_the_plan_does_not_fit_a_rank_plans_for_itself(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    more = BUDGET - ask(0, Planner(PROBLEM)).peak + 1
    fuller = Planner(_with(resident_bytes=PROBLEM.resident + more))
    found = ask(1, fuller)
    assert fuller.calls == 1
    assert found.peak is None or found.peak <= BUDGET
    assert "does not fit rank 1" in caplog.text


def test_that_nothing_fits_is_told_to_all(ask: Ask) -> None:
    planner, follower = Planner(PROBLEM, SMALLEST // 2), Planner(PROBLEM, SMALLEST // 2)
    planned, followed = ask(0, planner, SMALLEST // 2), ask(1, follower, SMALLEST // 2)
    assert follower.calls == 0
    assert planned.status is followed.status is Status.INFEASIBLE
    assert planned.message == followed.message
    assert planned.refusal == followed.refusal is not None
    assert planned.method == followed.method


def test_a_rank_that_fails_fails_all(ask: Ask) -> None:
    with pytest.raises(ZeroDivisionError):
        ask(0, Mock(problem=PROBLEM, side_effect=ZeroDivisionError("no more")))
    with pytest.raises(SolverError, match=r"Rank 0 .* failed. ZeroDivisionError: no more"):
        ask(1, Planner(PROBLEM))


def test_a_rank_that_ends_while_it_plans_is_missed(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the signs of life that it gives no more."""
    monkeypatch.setattr(ranks, "_plan_for_all", lambda *args: None)  # it was killed
    ask(0, Planner(PROBLEM))
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 0.02)
    with pytest.raises(
        SolverError, match="Rank 0 was to plan this step for all, and has given no sign of life for 0 s"
    ):
        ask(1, Planner(PROBLEM))


def test_a_rank_that_plans_for_long_is_waited_for(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 0.4)
    planner, begun = Planner(PROBLEM), threading.Event()

    def slowly() -> Solution:
        begun.set()
        time.sleep(1.2)
        return planner()

    slow = Mock(problem=PROBLEM, side_effect=slowly)
    with ThreadPoolExecutor() as pool:
        planned = pool.submit(ask, 0, slow)
        assert begun.wait(60)
        followed = ask(1, Planner(PROBLEM))
        assert followed.origin == "rank 0"
        assert followed.cost == planned.result().cost
    assert "checkmate planning" not in {thread.name for thread in threading.enumerate()}


def test_a_store_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which keeps it, was killed."""
    gone = Mock(**{"add.side_effect": dist.DistNetworkError("connection reset")})
    monkeypatch.setattr(ranks, "_store", lambda: gone)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(SolverError, match=r"keeps it, rank 0 in most jobs, has ended .*\(connection reset\)"):
        ranks.one_plan(Mock())(Query(PROBLEM, BUDGET))


def test_a_changed_answer_is_refused(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(0, Planner(PROBLEM))
    follow = ranks._follow

    def changed(document: dict[str, Any], *args: Any) -> Any:
        document["record"]["bound"] = 2 * document["record"]["cost"]
        return follow(document, *args)

    monkeypatch.setattr(ranks, "_follow", changed)
    with pytest.raises(InvalidProblem, match="The plan of rank 0 is no valid plan"):
        ask(1, Planner(PROBLEM))


def test_a_process_among_imagined_ones_plans_for_itself() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        planner = Planner(PROBLEM)
        assert ranks.one_plan(lambda query: planner())(Query(PROBLEM, BUDGET)).plan is not None
        assert planner.calls == 1
    finally:
        dist.destroy_process_group()
