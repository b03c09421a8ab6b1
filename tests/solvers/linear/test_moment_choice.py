"""Moments come where a plan shows that memory is tight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.linear.moments import (
    EXACT,
    Bound,
    default_moments,
    moment_bound,
    next_moments,
    where_it_breaks,
    where_runs_repeat,
)
from checkmate.solvers.search.greedy import next_use

# op 0 makes what ops 1, 3 and 5 read; op 4 is large
STEP = Problem.from_dag([[], [0], [1], [0, 2], [3], [0, 4], [5]], seconds=[5] + [1] * 6, sizes=[4, 4, 4, 4, 9, 4, 4])


def paid_once(problem: Problem, R: np.ndarray, moments: list[int]) -> float:
    """Seconds of a plan whose ops count once between two moments."""
    return float(np.logical_or.reduceat(R, [0, *(t + 1 for t in moments)], axis=0).sum(axis=0) @ problem.seconds)


def test_a_moment_comes_between_two_runs_where_most_is_at_hand() -> None:
    R = np.eye(7, dtype=bool)  # bytes at hand with the runs below: 4, 8, 8, 12, 13, 17, 8
    R[5, 0] = True
    assert where_runs_repeat(STEP, R, [], most=3) == [4]
    assert where_runs_repeat(STEP, R, [4], most=3) == []
    R[3, 0] = True
    assert where_runs_repeat(STEP, R, [], most=1) == [4]
    assert where_runs_repeat(STEP, R, [4], most=3) == [1]  # stages 1 and 2 have 8 bytes both
    assert where_runs_repeat(STEP, R, [], most=3) == [4, 1]


def test_what_pays_next_to_nothing_is_not_worth_a_moment() -> None:
    problem = replace(STEP, profile=replace(STEP.profile, seconds=np.array([0.01, 1, 1, 1, 1, 1, 1])))
    R = np.eye(7, dtype=bool)
    R[5, 0] = True
    assert where_runs_repeat(problem, R, [], most=3) == []


def test_all_runs_of_a_plan_are_paid_with_enough_moments() -> None:
    problem = dags.unit_chain(8)
    task = Task(problem, 3, Clock(1.0))
    incumbent = Incumbent(task)
    next_use(task, incumbent)
    assert incumbent.R is not None
    few, enough = (where_runs_repeat(problem, incumbent.R, [], most=most) for most in (1, 17))
    assert enough[:1] == few
    assert paid_once(problem, incumbent.R, few) < paid_once(problem, incumbent.R, sorted(enough)) == incumbent.cost
    assert where_runs_repeat(problem, np.eye(17, dtype=bool), [], most=17) == []


def test_one_stage_in_each_gap_that_breaks_the_budget_the_worst_first() -> None:
    R = np.eye(7, dtype=bool)  # bytes: 4, 8, 12, 12, 17, 17, 8
    assert where_it_breaks(STEP, 10, R, [], most=3) == [4]
    assert where_it_breaks(STEP, 10, R, [3], most=3) == [4, 2]
    assert where_it_breaks(STEP, 10, R, [3], most=1) == [4]
    assert where_it_breaks(STEP, 10, R, [3, 4, 5], most=3) == [2]
    assert where_it_breaks(STEP, 17, R, [], most=3) == []


def test_several_moments_at_a_time_far_from_the_best_plan_and_one_close_to_it() -> None:
    problem, budget = dags.unit_chain(16), 5
    task = Task(problem, budget, Clock(10.0), gap=EXACT)
    incumbent = Incumbent(task)
    bound = moment_bound(task, incumbent, moments=default_moments(problem), most=1)
    (only,) = bound.moments
    next_use(task, incumbent)
    several = next_moments(problem, budget, bound, incumbent, most=12)
    assert len(several) > 2
    assert only in several
    assert len(next_moments(problem, budget, bound, incumbent, most=2)) == 2
    assert next_moments(problem, budget, bound, incumbent, most=1) == [only]
    incumbent.cost = 1.005 * bound.value
    assert len(next_moments(problem, budget, bound, incumbent, most=12)) == 2


def test_a_model_out_of_time_is_followed_by_none() -> None:
    problem = dags.unit_chain(8)
    bound = Bound(17.0, (8,), np.zeros((1, 17), dtype=bool), np.zeros((2, 17), dtype=bool), cut=True)
    assert next_moments(problem, 4, bound, Incumbent(Task(problem, 4)), most=12) == [8]


def test_what_a_plan_repeats_is_looked_at_beside_where_the_answer_breaks_the_budget() -> None:
    problem = dags.unit_chain(8)
    task = Task(problem, 3, Clock(10.0), gap=EXACT)
    incumbent = Incumbent(task)
    bound = moment_bound(task, incumbent, most=2)
    alone = next_moments(problem, 3, bound, incumbent, most=17)
    next_use(task, incumbent)
    assert set(alone) < set(next_moments(problem, 3, bound, incumbent, most=17))
