"""Of a step that has no plan as it is, the cheapest split is taken, not the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkmate.core.problem import Problem
from checkmate.solvers.solve import attempt, solve

CHAIN: list[list[int]] = [[], [0], [1], [2], [0, 1, 3]]


def _problem(seconds: int, sizes: list[int], name: str, smaller: Problem | None) -> Problem:
    problem = Problem.from_dag(CHAIN, seconds=[seconds] * 5, sizes=sizes)
    return replace(problem, splits=(name,) if name else (), smaller=lambda: smaller)


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

    tight = replace(_problem(1, [1, 1, 1, 1, 1], "tight", None), smaller=never)
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
