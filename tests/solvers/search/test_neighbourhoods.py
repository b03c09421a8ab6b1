"""Neighbourhoods of a plan: with all places free their model is exact, and with some it is never wrong."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import cost_of, fits_budget, peak_of, without_useless
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import cost_unit
from checkmate.solvers.search.min_budget import least_memory
from checkmate.solvers.search.neighbourhoods import build, places_around, search_around
from tests.solvers.checks import runs
from tests.support.oracle import PLAIN_AND_WAYS, Make, optima, random_ruled_problem
from tests.support.sampling import in_turn, long


def everywhere(problem: Problem) -> np.ndarray:
    """All places in which ops may run."""
    T = len(problem.graph.ops)
    there = np.tril(np.ones((T, T), dtype=bool))
    for k, op in enumerate(problem.graph.ops):
        there[problem.limits.last_stage.get(k, T) + 1 :, k] = False
        if op.pinned is not None:
            there[k + 1 :, k] = False
    return there


@in_turn(make=[*PLAIN_AND_WAYS, random_ruled_problem], seed=[*range(8), *map(long, range(8, 20))])
def test_with_all_places_free_the_best_is_that_of_brute_force(make: Make, seed: int) -> None:
    problem = make(seed, most_ops=4)
    for budget, best in optima(problem):
        near = build(problem, budget, runs(problem), everywhere(problem))
        answer = highs.run(near.model)
        assert (answer.x is None) == (best == float("inf"))
        if answer.x is not None:
            assert answer.objective * cost_unit(problem) == pytest.approx(best)
            found = without_useless(problem.graph, near.runs(answer.x))
            assert fits_budget(problem, budget, found)
            assert cost_of(problem, found) == pytest.approx(best)


@in_turn(make=PLAIN_AND_WAYS, seed=range(25))
def test_a_schedule_is_in_the_model_exactly_from_its_peak_on(make: Make, seed: int) -> None:
    """Fixed places are counted as those that are decided, whichever are free."""
    problem, rng = make(1000 + seed, most_ops=10), np.random.default_rng(seed)
    there = everywhere(problem)
    R = there & (rng.random(there.shape) < rng.choice([0.1, 0.4]))
    np.fill_diagonal(R, True)
    R = without_useless(problem.graph, R)
    peak = peak_of(problem, R)
    free = there & (rng.random(there.shape) < rng.random())
    for budget, expected in ((peak, True), (peak - 1, False)):
        near = build(problem, budget, R, free)
        columns, values = near.start(R)
        near.model.constrain("the schedule", [(columns, 1.0)], lower=values, upper=values)
        assert (highs.run(near.model).x is not None) == expected


def test_the_chain_is_solved_from_its_plan_of_the_smallest_peak() -> None:
    """The plan stays as it is without time."""
    chain = dags.unit_chain(8)
    start = least_memory(chain)[1]
    assert np.array_equal(search_around(Task(chain, 4, Clock(0.0)), start), start)
    found = search_around(Task(chain, 4, Clock(60.0)), start)
    assert (peak_of(chain, found) <= 4, found.sum()) == (True, 26)  # the optimum


def test_no_place_is_where_an_op_must_not_run() -> None:
    problem = Problem.from_dag([[], [0], [], [1, 2]], [1] * 4, [1] * 4, overwrites={2: [0]})
    R = runs(problem)
    assert np.argwhere(places_around(problem, R, 3) & ~R).tolist() == [[1, 0], [3, 1]]
