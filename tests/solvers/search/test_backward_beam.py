"""The search backwards that counts seconds: the optimum with every state, and on either side of it with few."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.simulator import lower_runs
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.common.schedules import as_matrix, cost_of
from checkmate.solvers.common.task import Clock
from checkmate.solvers.search.backward_beam import Beam, prices
from checkmate.solvers.search.value_sets import ValueSets
from tests.support.all_plans import least_seconds
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem, random_problem_with_ways
from tests.support.sampling import every, in_turn

Make = Callable[..., Problem]
MANY = 10**6  # states: more than there are


def beam(
    problem: Problem,
    budget: int,
    width: int,
    *,
    worth: float = 0.1,
    seconds: float = math.inf,
    any_order: bool = False,
) -> Beam:
    sets = ValueSets(problem)
    price = prices(sets, budget, np.full(sets.T, worth))
    return Beam(sets, budget, width, price, Clock(seconds), any_order=any_order)


@in_turn(make=[random_problem, random_problem_with_ways], block=every(8, range(8)), any_order=[False, True])
def test_with_every_state_it_is_the_optimum(make: Make, block: int, any_order: bool) -> None:
    for seed in range(10 * block, 10 * block + 10):
        problem = make(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best = least_seconds(problem, known, budget) if any_order else optimum(known, budget)
            search = beam(problem, budget, MANY, any_order=any_order)
            seconds, found = search.bound()
            assert search.complete
            if best == math.inf:
                assert seconds == math.inf
                assert found is None
                continue
            assert found is not None
            assert problem.keep_all_cost + seconds == pytest.approx(best)
            assert certify(problem, budget, lower_runs(problem, found), method="beam").cost == pytest.approx(best)


@in_turn(
    make=[random_problem, random_problem_with_ways], block=every(8, range(8)), width=[1, 2, 4], any_order=[False, True]
)
def test_merged_states_are_never_above_the_optimum(make: Make, block: int, width: int, any_order: bool) -> None:
    for seed in range(10 * block, 10 * block + 10):
        problem = make(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best = least_seconds(problem, known, budget) if any_order else optimum(known, budget)
            for worth in (0.0, 0.3):
                seconds, found = beam(problem, budget, width, worth=worth, any_order=any_order).bound()
                assert problem.keep_all_cost + seconds <= best + 1e-9
                if found is not None:
                    cost = certify(problem, budget, lower_runs(problem, found), method="beam").cost
                    assert cost == pytest.approx(problem.keep_all_cost + seconds)


def test_merging_happens_in_the_tests_above_and_loses_something() -> None:
    """The bound of few states is below that of all, and rises with them."""
    chain = dags.unit_chain(8)
    found = [beam(chain, 4, width) for width in (1, 4, 16, MANY)]
    bounds = [search.bound()[0] for search in found]
    assert [search.complete for search in found] == [False, False, False, True]
    assert bounds[0] < bounds[-1] == 26 - chain.keep_all_cost
    assert all(bound <= bounds[-1] for bound in bounds)


@pytest.mark.parametrize(("layers", "budget", "best"), [(8, 3, 45), (8, 5, 22), (16, 4, 67), (16, 5, 53), (16, 6, 47)])
def test_known_optima_of_unit_chains(layers: int, budget: int, best: int) -> None:
    chain = dags.unit_chain(layers)
    seconds, found = beam(chain, budget, MANY).bound()
    assert found is not None
    assert sum(map(len, found)) == best == chain.keep_all_cost + seconds


def test_nothing_below_what_is_asked_for_is_found_nor_proven_impossible_above() -> None:
    """A search for less than the optimum proves just what it looked for."""
    chain = dags.unit_chain(8)
    search = beam(chain, 5, MANY)
    search.most = 22 - chain.keep_all_cost
    assert search.bound() == (search.most, None)


@pytest.mark.parametrize("block", every(8, range(8)))
def test_plans_fit_and_are_no_dearer_than_the_known_one(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        problem = random_problem(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known)[:-1]:
            best = optimum(known, budget)
            found = beam(problem, budget, MANY).bound()[1]
            assert best == math.inf or found is not None
            start = None if found is None else as_matrix(found)
            for width in (1, 3):
                alone = beam(problem, budget, width).search()
                assert alone is None or certify(problem, budget, alone, method="beam").cost >= best - 1e-9
                if start is not None:
                    beside = beam(problem, budget, width).search(start)
                    assert beside is not None
                    assert cost_of(problem, beside) == pytest.approx(best)
                    assert certify(problem, budget, beside, method="beam").plan is not None


def test_no_time_is_no_plan_and_proves_nothing() -> None:
    search = beam(dags.unit_chain(4), 4, 8, seconds=0.0)
    assert search.search() is None
    assert beam(dags.unit_chain(4), 4, 8, seconds=0.0).bound() == (0.0, None)


def test_a_price_is_what_keeping_takes_or_making_again() -> None:
    """The chain's first value: kept at 0.1 for each stage after the next, or made again in 1 second."""
    chain = dags.unit_chain(8)
    sets = ValueSets(chain)
    price = prices(sets, chain.keep_all_peak, np.full(sets.T, 0.1))
    assert price[0, 1] == 0.0
    assert price[0, 5] == pytest.approx(0.4)
    assert price[0, -1] == pytest.approx(1.0)
