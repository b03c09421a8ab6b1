"""Of a step that has no plan as it is, the cheapest split is taken, not the first."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf

import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.auto import Portfolio
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.solve import attempt, cheapest_split, min_budget, solve

CHAIN: list[list[int]] = [[], [0], [1], [2], [0, 1, 3]]


def _problem(seconds: int, sizes: list[int], name: str, smaller: Problem | None) -> Problem:
    problem = Problem.from_dag(CHAIN, seconds=[seconds] * 5, sizes=sizes)
    return replace(problem, splits=(name,) if name else (), next_split=lambda: smaller)


SMALL = _problem(4, [1, 1, 1, 1, 1], "small", None)
ROOMY = _problem(2, [1, 1, 1, 1, 1], "roomy", SMALL)
TIGHT = _problem(1, [3, 3, 1, 1, 1], "tight", ROOMY)
WHOLE = _problem(1, [9, 9, 9, 9, 9], "", TIGHT)


def test_the_cheapest_split_is_taken() -> None:
    budget = 8
    assert attempt(WHOLE, budget, time_limit=1).plan is None
    costs = {one.splits: attempt(one, budget, time_limit=1).cost for one in (TIGHT, ROOMY, SMALL)}
    assert solve(WHOLE, budget, time_limit=1).cost == min(costs.values())


@pytest.mark.parametrize("budget", [45, 36])
def test_what_fits_whole_is_not_split(budget: int) -> None:
    assert solve(WHOLE, budget, time_limit=1).problem is WHOLE


def test_splits_that_cannot_be_cheaper_are_not_asked_for() -> None:
    def never() -> Problem:
        raise AssertionError("asked for")

    tight = replace(_problem(1, [1, 1, 1, 1, 1], "tight", None), next_split=never)
    solution = solve(_problem(1, [9, 9, 9, 9, 9], "", tight), 8, time_limit=1)
    assert solution.problem is tight


def test_all_splits_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkmate.solvers import solve as module

    given = []

    def attempted(problem: Problem, budget: int, *, time_limit: float, **options: object) -> object:
        given.append(time_limit)
        return attempt(problem, budget, time_limit=time_limit)

    monkeypatch.setattr(module, "attempt", attempted)
    assert solve(WHOLE, 2, time_limit=1).plan is None
    assert given == [1, 1 / 2, 1 / 4, 1 / 8]


def test_no_problem_takes_all_the_time_where_the_next_split_has_a_plan_at_once() -> None:
    asked: list[tuple[str, float]] = []

    def find(one: Problem, seconds: float, patience: float) -> Solution:
        asked.append((one.splits[0] if one.splits else "", patience))
        if one is WHOLE:
            return Solution(Status.NOT_FOUND, one, 8, "auto")
        return attempt(one, 8, time_limit=1)

    found = cheapest_split(WHOLE, find, 60.0, look_on=False)
    assert found.problem is TIGHT
    (_, moment), *_ = asked
    assert moment < 1
    assert asked == [("", moment), ("tight", moment)]


def test_where_none_has_a_plan_after_a_moment_those_given_up_are_looked_at_for_long() -> None:
    asked: list[tuple[str, float]] = []

    def find(one: Problem, seconds: float, patience: float) -> Solution:
        name = one.splits[0] if one.splits else ""
        asked.append((name, seconds if patience == inf else 0.0))
        if name == "roomy" and patience == inf:
            return attempt(one, 8, time_limit=1)
        return Solution(Status.INFEASIBLE if name == "tight" else Status.NOT_FOUND, one, 8, "auto")

    assert cheapest_split(WHOLE, find, 60.0).problem is ROOMY
    assert asked == [("", 0.0), ("tight", 0.0), ("roomy", 0.0), ("small", 0.0), ("", 60.0), ("roomy", 30.0)]


def test_auto_gives_up_without_a_plan_and_goes_on_with_one() -> None:
    incumbent = Incumbent(Task(WHOLE, 36, Clock(100.0)))
    search = Portfolio(incumbent.task, incumbent, settle=0.0, known=None, patience=0.5)
    assert search.left < 0.5
    incumbent.best, incumbent.cost = solve(WHOLE, 36), 5.0
    assert search.left > 99.0
    assert solve(WHOLE, 36, patience=0.5).plan is not None


def test_a_plan_of_more_than_double_the_step_names_a_budget_that_halves_it() -> None:
    n = 20  # a chain, and a backward that reads it from its end: near the smallest budget it runs again and again
    backward = [[n - 1 - j, *([n + j - 1] if j else [])] for j in range(n)]
    problem = Problem.from_dag([[], *([k] for k in range(n - 1)), *backward], seconds=[1] * 2 * n, sizes=[1] * 2 * n)
    slow = solve(problem, min_budget(problem).peak, time_limit=5)
    assert slow.cost > 2 * problem.keep_all_cost
    more, seconds = slow.details["halved"]
    assert slow.budget < more <= problem.keep_all_peak
    assert seconds <= slow.cost / 2
    assert solve(problem, more, time_limit=5).cost <= seconds * (1 + 1e-9)
    assert "with more" in str(slow)
    assert "halved" not in solve(problem, problem.keep_all_peak).details


def test_the_budget_that_halves_is_found_in_a_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of 10 bytes, where a twentieth of the budget is less than one."""
    tried: list[int] = []

    def counted(problem: Problem, budget: int, **options: object) -> Solution:
        tried.append(budget)
        return attempt(problem, budget, **options)

    monkeypatch.setattr(sys.modules[solve.__module__], "attempt", counted)
    solution = solve(dags.unit_chain(8), 3)
    assert solution.details["halved"][0] in tried
    assert len(tried) == len({*tried}) > 1
