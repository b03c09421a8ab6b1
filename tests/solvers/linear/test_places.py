"""The exact model on chosen places: exact with all of them, a plan with fewer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.runs import choose_places, peak_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.linear.highs import Outcome
from checkmate.solvers.linear.places import restricted
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem, random_problem_with_ways
from tests.support.sampling import every

next_use = METHODS["next-use"].solve


def begun(problem: Problem, budget: int, start: np.ndarray | None = None, **options: Any) -> Incumbent:
    """The incumbent of a task, with a known schedule where one is given."""
    incumbent = Incumbent(Task(problem, budget, **options))
    assert start is None or incumbent.offer(start, "start")
    return incumbent


def all_places(problem: Problem) -> np.ndarray:
    """Every stage and op that a schedule may have."""
    ops = problem.graph.ops
    return np.array([(t, k) for t in range(len(ops)) for k in range(t + 1) if k == t or not ops[k].pinned])


@pytest.mark.parametrize("block", every(10, range(10)))
def test_with_all_places_it_is_exact(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        make = (random_problem, random_problem_with_ways)[seed % 2]
        problem = make(seed, most_ops=5 if seed % 4 == 0 else 4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best = optimum(known, budget)
            found = begun(problem, budget)
            answer = restricted(found.task, found, all_places(problem))
            if np.isinf(best):
                assert found.R is None
                assert answer.outcome is Outcome.INFEASIBLE
            else:
                assert found.R is not None
                assert found.cost == pytest.approx(best) == pytest.approx(answer.bound)
                assert Schedule.from_runs(problem.graph, found.R).violations(problem, budget) == []


@pytest.mark.parametrize(("budget", "cost"), [(3, 45), (4, 26), (5, 22), (6, 21), (8, 19)])
def test_golden_optima_of_the_chain(budget: int, cost: int) -> None:
    problem = dags.unit_chain(8)
    found = begun(problem, budget)
    restricted(found.task, found, all_places(problem))
    assert found.cost == pytest.approx(cost)


@pytest.mark.parametrize("name", ["vgg", "unet", "gpt"])
def test_never_worse_than_its_start_and_within_the_budget(name: str) -> None:
    problem = {"vgg": dags.vgg(10), "unet": dags.unet(3), "gpt": dags.gpt(2)}[name]
    floor = int(problem.unavoidable_bytes.max())
    budget = (floor + problem.keep_all_peak) // 2
    start = next_use(problem, budget, time_limit=1)
    assert start.schedule is not None
    candidates = np.flatnonzero(start.schedule.recomputed).tolist()
    places = choose_places(problem, candidates, also=start.schedule.R)
    found = begun(problem, budget, start.schedule.R, clock=Clock(3.0), gap=1e-4)
    restricted(found.task, found, places)
    assert found.R is not None
    assert found.cost <= start.cost * (1 + 1e-9)
    assert peak_of(problem, found.R) <= budget
    assert set(np.flatnonzero(found.R.sum(axis=0) > 1)) <= set(candidates)


def test_frozen_places_stay_as_they_are() -> None:
    problem = dags.unit_chain(6)
    start = next_use(problem, 4)
    assert start.schedule is not None
    R = start.schedule.R
    places = choose_places(problem, range(13), also=R)
    found = begun(problem, 4, R)
    answer = restricted(found.task, found, places, frozen=np.ones(len(places), dtype=bool))
    assert (answer.outcome, answer.bound) == (Outcome.OPTIMAL, pytest.approx(found.cost))  # there is no other
    assert np.array_equal(found.R, R)
    restricted(found.task, found, places, frozen=places[:, 0] < 7)
    assert found.R is not None
    assert np.array_equal(found.R[:7], R[:7])


def test_a_target_ends_the_search() -> None:
    problem = dags.unit_chain(8)
    found = begun(problem, 4)
    restricted(found.task, found, all_places(problem), target=30.0)
    assert found.cost <= 30.0


def test_places_are_of_use_and_in_order() -> None:
    problem = Problem.from_dag([[], [0], [1], [2], [1, 3]], seconds=[1] * 5, sizes=[1] * 5)
    places = choose_places(problem, range(5)).tolist()
    assert places == sorted(places)
    assert [k for t, k in places if t == 4] == [0, 1, 2, 3, 4]
    assert [k for t, k in choose_places(problem, [1]).tolist() if t == 4] == [1, 4]
    assert [k for t, k in choose_places(problem, range(5), most=0).tolist() if t == 4] == [1, 3, 4]


def test_pinned_ops_have_one_place() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        for t, k in choose_places(problem, range(len(problem.graph.ops))).tolist():
            assert t == k or problem.graph.ops[k].pinned is None
