"""The search over tilts of the eviction pass."""

from __future__ import annotations

import math
import time

import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core.schedule import Schedule
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search.greedy import TiltedPasses
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem
from tests.support.sampling import in_turn, long

next_use = METHODS["next-use"].solve

SECONDS = 60.0  # not reached: the searches end by themselves, or find what they look for


@in_turn(seed=[*range(5), *map(long, range(5, 12))])
def test_never_below_the_optimum_and_never_over_the_budget(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    known = outcomes(problem)
    for budget in interesting_budgets(known)[:-1]:
        R = TiltedPasses(Task(problem, budget)).search(Clock(SECONDS))
        if R is not None:
            assert certify(problem, budget, R, method="tilted").cost >= optimum(known, budget) - 1e-9


def test_nothing_fits_below_what_one_op_needs() -> None:
    problem = dags.unit_chain(4)
    assert TiltedPasses(Task(problem, 2)).search(Clock(SECONDS)) is None


@pytest.mark.slow
@pytest.mark.long
def test_finds_what_the_formulas_miss_close_to_the_smallest_budget() -> None:
    problem = dags.unet(2)
    budget = int(1.02 * checkmate.min_budget(problem).peak)
    tilts = TiltedPasses(Task(problem, budget, seed=2))
    formulas, give_up = next_use(problem, budget, time_limit=10.0).cost, time.perf_counter() + SECONDS
    found = math.inf
    while found > formulas and time.perf_counter() < give_up:  # some 3 s on a machine with nothing else to do
        R = tilts.search(Clock(2.0))
        assert R is not None
        assert Schedule.from_runs(problem.graph, R).violations(problem, budget) == []
        found = R.sum(axis=0) @ problem.seconds
    assert found <= formulas


@pytest.mark.long
def test_the_same_seed_gives_the_same_plan() -> None:
    problem, budget = dags.unit_chain(8), 5
    first, second = (TiltedPasses(Task(problem, budget)).search(Clock(SECONDS)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first == second).all()


def test_a_later_search_goes_on_from_the_plans_before() -> None:
    problem = dags.unet(2)
    tilts = TiltedPasses(Task(problem, int(1.05 * checkmate.min_budget(problem).peak)))
    costs = []
    for _ in range(3):
        R = tilts.search(Clock(0.5))
        assert R is not None
        costs.append(R.sum(axis=0) @ problem.seconds)
    assert costs == sorted(costs, reverse=True)
