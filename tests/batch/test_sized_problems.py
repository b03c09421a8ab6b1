"""Problems at many sizes, and a plan under a cap on its seconds: against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.networks.dags import unet
from checkmate import Problem
from checkmate.batch.size_search import ONE_FORWARD, check_overhead, is_beyond, is_within, most_seconds, plan_within
from checkmate.batch.sized_steps import SizedProblems
from checkmate.core.problem import Profile
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem, random_problem_with_ways
from tests.support.sampling import in_turn


def grown(problem: Problem, size: int, block: int = 1) -> Problem:
    """The problem with bytes and seconds that grow with the size; sizes rounded up to a block, as allocators do."""
    values = tuple(replace(v, size_bytes=-(-v.size_bytes * size // block) * block) for v in problem.graph.values)
    seconds = problem.seconds * size + 0.5
    ways = tuple(replace(way, workspace=way.workspace * size) for way in problem.profile.ways)
    profile = Profile(seconds, problem.workspace * size, problem.resident + 10, ways=ways)
    return Problem(replace(problem.graph, values=values), profile)


@in_turn(base=[random_problem(3), random_problem_with_ways(3)])
def test_an_estimate_of_what_is_affine_is_the_truth(base: Problem) -> None:
    problems = SizedProblems(lambda n: grown(base, n))
    problems.at(2), problems.at(5)
    for n in (1, 3, 4, 9, 100):
        estimate, truth = problems.estimate(n), grown(base, n)
        assert estimate.sizes.tolist() == truth.sizes.tolist()
        assert estimate.workspace.tolist() == truth.workspace.tolist()
        assert estimate.resident == truth.resident
        assert estimate.profile.ways == truth.profile.ways
        np.testing.assert_allclose(estimate.seconds, truth.seconds, rtol=1e-12)
    assert sorted(problems.traced) == [2, 5]
    problems = SizedProblems(lambda n: grown(base, n, block=8))  # between two traces less than a block each is amiss
    problems.at(3), problems.at(11)
    for n in range(4, 11):
        assert np.abs(problems.estimate(n).sizes - grown(base, n, block=8).sizes).max() <= 8


def test_the_nearest_traces_count() -> None:
    """Where memory bends, the two sizes next to it say how."""
    problems = SizedProblems(lambda n: Problem.from_dag([[]], [1], [n if n <= 10 else 100 * n]))
    for n in (1, 10, 20, 30):
        problems.at(n)
    assert problems.estimate(40).keep_all_peak == 4000
    assert problems.estimate(25).keep_all_peak == pytest.approx(2500, rel=0.15)


def test_there_is_no_estimate_from_one_trace_or_from_two_kinds_of_graph() -> None:
    problems = SizedProblems(lambda n: Problem.from_dag([[]] * min(n, 2), [1] * min(n, 2), [n] * min(n, 2)))
    for size, known in ((1, False), (2, False), (4, True)):
        problems.at(size)
        assert (problems.estimate(3) is not None) == known


def test_a_size_is_traced_once() -> None:
    trace = Mock(side_effect=lambda n: Problem.from_dag([[]], [1], [n]))
    problems = SizedProblems(trace)
    assert problems.at(3) is problems.at(3) is problems.estimate(3)
    trace.assert_called_once_with(3)


@in_turn(wrong=[True, -0.1, math.inf, math.nan, "two-forwards", [1]])
def test_a_cap_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="one-forward"):
        check_overhead(wrong)


@in_turn(seed=range(25))
def test_a_plan_under_a_cap_is_found_where_there_is_one_and_else_refuted(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    found = outcomes(problem)
    for budget in interesting_budgets(found):
        best = optimum(found, max(1, budget))
        for overhead in (None, ONE_FORWARD, 0.0, 0.2, 1.0):
            cap = most_seconds(problem, overhead)
            solution = plan_within(problem, max(1, budget), cap, time_limit=5.0)
            if best <= cap and best < math.inf:
                assert is_within(solution, cap), (budget, overhead)
                assert solution.cost <= cap * (1 + 1e-9)
            else:
                assert not is_within(solution, cap)
                assert is_beyond(solution, cap), (budget, overhead)


@pytest.mark.slow
def test_it_stops_at_the_first_plan_under_the_cap() -> None:
    """Proving the least recomputation of this step takes far longer."""
    problem = unet()
    budget = problem.keep_all_peak // 2
    solution = plan_within(problem, budget, most_seconds(problem, ONE_FORWARD), time_limit=30.0)
    assert is_within(solution, most_seconds(problem, ONE_FORWARD))
    assert solution.seconds < 5


def test_a_jump_between_neighbours_is_not_drawn_out() -> None:
    def trace(n: int) -> Problem:
        return Problem.from_dag([[], [0]], [n] * 2, sizes=[4 * n + (n == 101) * 100] * 2)

    problems = SizedProblems(trace)
    for size in (50, 100, 101):
        problems.at(size)
    assert problems.estimate(75).live_bytes.tolist() == trace(75).live_bytes.tolist()
    assert problems.estimate(150).live_bytes.max() < 2 * trace(150).live_bytes.max()
