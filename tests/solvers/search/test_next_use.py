"""Next use, and the eviction passes it is made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.schedules import as_matrix, peak_of
from checkmate.solvers.search.greedy import GRID, DeadEnd, Weights, run_pass
from checkmate.solvers.search.min_budget import least_runs, min_budget
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem, random_problem_with_ways
from tests.support.sampling import every, in_turn, long

Make = Callable[..., Problem]
next_use = METHODS["next-use"].solve

STEPS = {
    "vgg": dags.vgg(10),
    "resnet": dags.resnet(),
    "mobilenet": dags.mobilenet(6),
    "unet": dags.unet(3),
    "gpt": dags.gpt(3),
}


def check(solution: Solution) -> None:
    """The plan verifies, and the solution says of it what the simulator says."""
    assert solution.plan is not None
    assert solution.schedule is not None
    assert simulator.check_plan(solution.plan, solution.problem, solution.budget) == []
    assert solution.schedule.violations(solution.problem, solution.budget) == []
    assert solution.cost == pytest.approx(simulator.cost(solution.plan, solution.problem))
    assert solution.peak == simulator.simulate(solution.plan, solution.problem).peak <= solution.budget
    assert solution.bound <= solution.cost


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_plans_of_training_steps_verify(name: str, share: float) -> None:
    problem = STEPS[name]
    floor = int(problem.unavoidable_bytes.max())
    budget = int(floor + share * (problem.keep_all_peak - floor))
    solution = next_use(problem, budget, time_limit=2)
    check(solution)
    assert solution.overhead < 0.35


@in_turn(make=[random_problem, random_problem_with_ways], seed=every(8, range(24)))
def test_never_below_the_optimum_and_mostly_on_it(make: Make, seed: int) -> None:
    problem = make(seed)
    known = outcomes(problem)
    for budget in interesting_budgets(known):
        best = optimum(known, budget)
        solution = next_use(problem, budget)
        assert solution.cost >= best - 1e-9
        if solution.plan is not None:
            check(solution)


@pytest.mark.long
def test_finds_the_optimum_of_nearly_all_small_problems() -> None:
    hits = misses = 0
    for seed in range(120):
        problem = random_problem(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known)[:-1]:
            hit = next_use(problem, budget).cost <= optimum(known, budget) + 1e-9
            hits, misses = hits + hit, misses + (not hit)
    assert misses <= 0.02 * hits


@in_turn(make=[random_problem, random_problem_with_ways], seed=[*range(15), *map(long, range(15, 40))])
def test_the_memory_that_a_pass_counts_is_never_below_the_simulators(make: Make, seed: int) -> None:
    problem = make(1000 + seed, most_ops=16)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    for budget in {low, (low + high) // 2, high}:
        for weights in GRID[::5]:
            stages = run_pass(Tables.of(problem), budget, weights)
            if not isinstance(stages, DeadEnd):
                R = as_matrix(stages)
                assert peak_of(problem, R) <= budget
                assert Schedule.from_runs(problem.graph, R).violations(problem, budget) == []


def test_no_pressure_no_recomputation() -> None:
    for problem in STEPS.values():
        solution = next_use(problem, problem.keep_all_peak)
        assert solution.status is Status.OPTIMAL
        assert solution.cost == pytest.approx(problem.keep_all_cost)


@pytest.mark.long
def test_the_same_seed_gives_the_same_plan() -> None:
    problem = STEPS["unet"]
    budget = int(0.7 * problem.keep_all_peak)
    first, second = (next_use(problem, budget, time_limit=60, seed=3) for _ in range(2))
    assert first.schedule is not None
    assert second.schedule is not None
    assert np.array_equal(first.schedule.R, second.schedule.R)


def test_the_plan_of_the_first_pass_is_offered_at_once() -> None:
    problem, tables = STEPS["mobilenet"], Tables.of(STEPS["mobilenet"])
    budget = int(0.7 * problem.keep_all_peak)
    passes = [run_pass(tables, budget, weights) for weights in GRID]
    first, *others = [tables.seconds_of(stages) for stages in passes if not isinstance(stages, DeadEnd)]
    assert first > min(others)
    _, cost, _ = next_use(problem, budget).details["trajectory"][0]
    assert cost == pytest.approx(first)


def test_a_first_plan_of_a_thousand_ops_takes_less_than_two_seconds() -> None:
    problem = dags.gpt(24)
    began = time.perf_counter()
    solution = next_use(problem, problem.keep_all_peak // 2, time_limit=0.5)
    assert time.perf_counter() - began < 2.0
    check(solution)


def masked(noise: int, mask: int) -> Problem:
    """A pinned op draws a mask, the next makes noise of it, which the last reads; in between there is pressure."""
    values = [Value("mask", mask, 0), Value("noise", noise, 1), Value("big", 6, 2), Value("small", 1, 3)]
    values += [Value("end", 1, 4)]
    ops = [
        Op("draw", "f", (), (0,), pinned="draws random numbers"),
        Op("spread", "f", (0,), (1,)),
        Op("grow", "f", (), (2,)),
        Op("shrink", "f", (2,), (3,)),
        Op("end", "f", (1, 3), (4,)),
    ]
    return Problem(Graph(tuple(ops), tuple(values), (4,)), Profile(np.ones(5), np.zeros(5)))


def test_a_mask_that_nobody_reads_again_is_kept_to_bring_back_what_is_made_of_it() -> None:
    solution = next_use(masked(noise=4, mask=1), budget=8)
    check(solution)
    assert solution.schedule is not None
    assert solution.schedule.recomputed.tolist() == [0, 1, 0, 0, 0]


def test_pinned_ops_and_results_are_never_evicted() -> None:
    problem = masked(noise=4, mask=8)  # the mask is too large to stay: its noise has to
    assert next_use(problem, budget=12).cost == 5.0
    assert next_use(problem, budget=11).status is Status.NOT_FOUND


def test_what_is_needed_later_goes_with_the_run_that_writes_over_it() -> None:
    problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [8, 8, 1, 1], over={1: [0]})
    solution = next_use(problem, 10)
    check(solution)
    assert solution.schedule is not None
    assert solution.schedule.recomputed.tolist() == [1, 0, 0, 0]


def test_what_is_written_over_is_not_made_again_where_others_are_cheaper() -> None:
    """Op 2 has no room beside all three: either what it reads goes with it, or the value of op 0."""
    deps, over = [[], [], [1], [0, 1, 2]], {2: [1]}
    for seconds, again in (([1, 9, 1, 1], [1, 0, 0, 0]), ([9, 1, 1, 1], [0, 1, 0, 0])):
        problem = Problem.from_dag(deps, seconds, [4, 4, 4, 0], workspace=[0, 0, 4, 0], over=over)
        solution = next_use(problem, 12)
        check(solution)
        assert solution.schedule is not None
        assert solution.schedule.recomputed.tolist() == again


def test_a_guide_decides_what_goes_first() -> None:
    problem = Problem.from_dag(
        [[], [], [], [2], [0, 1, 3]], seconds=[1, 1, 1, 1, 1], sizes=[2, 2, 2, 1, 1], outputs=[4]
    )
    for first in (0, 1):
        kept = np.ones(5, dtype=bool)
        kept[first] = False
        stages = run_pass(Tables.of(problem), 6, Weights(outside=np.tile(~kept, (4, 1))))
        assert not isinstance(stages, DeadEnd)
        assert stages[4] == [first, 4]


def test_where_no_pass_fits_it_says_who_is_in_the_way() -> None:
    problem = STEPS["gpt"]
    solution = next_use(problem, int(problem.unavoidable_bytes.max()) // 2)
    assert solution.status is Status.NOT_FOUND
    assert problem.graph.ops[solution.stuck].name in solution.message


@in_turn(seed=[*range(0, 40, 2), *map(long, range(40, 120, 2))])
def test_the_smallest_budget_of_small_problems_is_exact(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    assert min_budget(problem).peak == interesting_budgets(outcomes(problem))[-1] + 1


@pytest.mark.parametrize("name", STEPS)
def test_the_smallest_budget_comes_with_its_plan(name: str) -> None:
    problem = STEPS[name]
    least, R = least_runs(problem)
    assert problem.unavoidable_bytes.max() <= least == peak_of(problem, R) <= problem.keep_all_peak
    assert least < 0.9 * problem.keep_all_peak


@pytest.mark.slow
def test_the_smallest_budget_of_a_long_step_is_found_in_seconds() -> None:
    problem = dags.gpt(24)
    began = time.perf_counter()
    least = min_budget(problem).peak
    assert time.perf_counter() - began < 8
    assert least < 0.45 * problem.keep_all_peak
