"""The exact model on chosen places: exact with all of them, a plan with fewer."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.solvers.common.runs import choose_places, peak_of
from checkmate.solvers.linear.highs import Outcome
from checkmate.solvers.linear.places import restricted
from checkmate.solvers.search.next_use import next_use
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem
from tests.support.sampling import every


def all_places(problem: Problem) -> np.ndarray:
    """Every stage and op that a schedule may have."""
    ops = problem.graph.ops
    return np.array([(t, k) for t in range(len(ops)) for k in range(t + 1) if k == t or not ops[k].pinned])


@pytest.mark.parametrize("block", every(10, range(10)))
def test_with_all_places_it_is_exact(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed, most_ops=5 if seed % 4 == 0 else 4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best = optimum(known, budget)
            answer = restricted(problem, budget, all_places(problem), gap=0.0)
            if np.isinf(best):
                assert answer.R is None
                assert answer.outcome is Outcome.INFEASIBLE
            else:
                assert answer.R is not None
                assert answer.cost == pytest.approx(best) == pytest.approx(answer.bound)
                assert Schedule.from_runs(problem.graph, answer.R).violations(problem, budget) == []


@pytest.mark.parametrize(("budget", "cost"), [(3, 45), (4, 26), (5, 22), (6, 21), (8, 19)])
def test_golden_optima_of_the_chain(budget: int, cost: int) -> None:
    problem = dags.unit_chain(8)
    assert restricted(problem, budget, all_places(problem), gap=0.0).cost == pytest.approx(cost)


@pytest.mark.parametrize("name", ["vgg", "unet", "gpt"])
def test_never_worse_than_its_start_and_within_the_budget(name: str) -> None:
    problem = {"vgg": dags.vgg(10), "unet": dags.unet(3), "gpt": dags.gpt(2)}[name]
    floor = int(problem.unavoidable_bytes.max())
    budget = (floor + problem.keep_all_peak) // 2
    start = next_use(problem, budget, time_limit=1)
    assert start.schedule is not None
    candidates = np.flatnonzero(start.schedule.recomputed).tolist()
    places = choose_places(problem, candidates, also=start.schedule.R)
    answer = restricted(problem, budget, places, start=start.schedule.R, time_limit=3)
    assert answer.R is not None
    assert answer.cost <= start.cost * (1 + 1e-9)
    assert peak_of(problem, answer.R) <= budget
    assert set(np.flatnonzero(answer.R.sum(axis=0) > 1)) <= set(candidates)


def test_frozen_places_stay_as_they_are() -> None:
    problem = dags.unit_chain(6)
    start = next_use(problem, 4)
    assert start.schedule is not None
    R = start.schedule.R
    places = choose_places(problem, range(13), also=R)
    answer = restricted(problem, 4, places, start=R, frozen=np.ones(len(places), dtype=bool))
    assert answer.R is not None
    assert np.array_equal(answer.R, R)
    half = places[:, 0] < 7
    answer = restricted(problem, 4, places, start=R, frozen=half)
    assert answer.R is not None
    assert np.array_equal(answer.R[:7], R[:7])


def test_a_target_ends_the_search() -> None:
    problem = dags.unit_chain(8)
    answer = restricted(problem, 4, all_places(problem), target=30.0)
    assert answer.R is not None
    assert answer.cost <= 30.0


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
