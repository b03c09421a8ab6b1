"""Next use, the eviction passes it is made of, and the search over their tilts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Status
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.common.schedules import as_matrix, cost_of, peak_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search.greedy import GRID, DeadEnd, TiltedPasses, Weights, run_pass
from tests.solvers.test_solve import check
from tests.support.oracle import optima, pinned, random_problem, random_problem_with_ways
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
    for budget, best in optima(problem):
        solution = next_use(problem, budget)
        assert solution.cost >= best - 1e-9
        if solution.plan is not None:
            check(solution)


@pytest.mark.long
def test_finds_the_optimum_of_nearly_all_small_problems() -> None:
    hits = []
    for seed in range(120):
        problem = random_problem(seed, most_ops=4)
        hits += [next_use(problem, budget).cost <= best + 1e-9 for budget, best in optima(problem)[:-1]]
    assert sum(hits) >= len(hits) / 1.02


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


def test_the_plan_of_the_first_pass_is_offered_at_once() -> None:
    """Where no pass fits it says who is in the way."""
    problem, tables = STEPS["mobilenet"], Tables.of(STEPS["mobilenet"])
    budget = int(0.7 * problem.keep_all_peak)
    passes = [run_pass(tables, budget, weights) for weights in GRID]
    first, *others = [tables.seconds_of(stages) for stages in passes if not isinstance(stages, DeadEnd)]
    assert first > min(others)
    _, cost, _ = next_use(problem, budget).details["trajectory"][0]
    assert cost == pytest.approx(first)
    solution = next_use(problem, int(problem.unavoidable_bytes.max()) // 2)
    assert solution.status is Status.NOT_FOUND
    assert problem.graph.ops[solution.stuck].name in solution.message


def test_a_first_plan_of_a_thousand_ops_takes_less_than_two_seconds() -> None:
    problem = dags.gpt(24)
    began = time.perf_counter()
    solution = next_use(problem, problem.keep_all_peak // 2, time_limit=0.5)
    assert time.perf_counter() - began < 2.0
    check(solution)


def masked(noise: int, mask: int) -> Problem:
    """A pinned op draws a mask, the next makes noise of it, which the last reads; in between there is pressure."""
    return pinned(Problem.from_dag([[], [0], [], [2], [1, 3]], [1] * 5, [mask, noise, 6, 1, 1]), 0)


# Op 2 has no room beside all three: either what it reads goes with it, or the value of op 0.
SHORT = {"deps": [[], [], [1], [0, 1, 2]], "sizes": [4, 4, 4, 0], "workspace": [0, 0, 4, 0], "over": {2: [1]}}


@pytest.mark.parametrize(
    ("problem", "budget", "again"),
    [
        (masked(noise=4, mask=1), 8, [0, 1, 0, 0, 0]),
        (masked(noise=4, mask=8), 12, [0, 0, 0, 0, 0]),  # the mask is too large to stay: its noise has to
        (Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [8, 8, 1, 1], over={1: [0]}), 10, [1, 0, 0, 0]),
        (Problem.from_dag(seconds=[1, 9, 1, 1], **SHORT), 12, [1, 0, 0, 0]),
        (Problem.from_dag(seconds=[9, 1, 1, 1], **SHORT), 12, [0, 1, 0, 0]),
    ],
    ids=[
        "a mask that nobody reads again is kept to bring back what is made of it",
        "where it cannot stay what a pinned op made does",
        "what is needed later goes with the run that writes over it",
        "what is written over is made again where it is cheaper",
        "and what is not where that is",
    ],
)
def test_what_runs_again(problem: Problem, budget: int, again: list[int]) -> None:
    solution = next_use(problem, budget)
    check(solution)
    assert solution.schedule.recomputed.tolist() == again
    if not any(again):
        assert next_use(problem, budget - 1).status is Status.NOT_FOUND


def test_a_guide_decides_what_goes_first() -> None:
    problem = Problem.from_dag([[], [], [], [2], [0, 1, 3]], [1] * 5, [2, 2, 2, 1, 1], outputs=[4])
    for first in (0, 1):
        stages = run_pass(Tables.of(problem), 6, Weights(outside=np.tile(np.arange(5) == first, (4, 1))))
        assert not isinstance(stages, DeadEnd)
        assert stages[4] == [first, 4]


SECONDS = 60.0  # not reached: the searches end by themselves, or find what they look for


@in_turn(seed=[*range(5), *map(long, range(5, 12))])
def test_tilted_passes_are_never_below_the_optimum_and_never_over_the_budget(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    for budget, best in optima(problem)[:-1]:
        R = TiltedPasses(Task(problem, budget)).search(Clock(SECONDS))
        assert R is None or certify(problem, budget, R, method="tilted").cost >= best - 1e-9


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
        assert Schedule.from_runs(problem.graph, R).violations(problem, budget) == []
        found = cost_of(problem, R)
    assert found <= formulas


@pytest.mark.long
def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = (TiltedPasses(Task(dags.unit_chain(8), 5)).search(Clock(SECONDS)) for _ in range(2))
    assert (first == second).all()


def test_a_later_search_goes_on_from_the_plans_before() -> None:
    """Nothing fits below what one op needs."""
    problem = dags.unet(2)
    tilts = TiltedPasses(Task(problem, int(1.05 * checkmate.min_budget(problem).peak)))
    costs = [cost_of(problem, tilts.search(Clock(0.2))) for _ in range(3)]
    assert costs == sorted(costs, reverse=True)
    assert TiltedPasses(Task(dags.unit_chain(4), 2)).search(Clock(SECONDS)) is None
