"""The search for what runs again in any order: the truth on all small problems, from both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, lower, lower_runs, simulate
from checkmate.solvers.common.schedules import as_matrix
from checkmate.solvers.common.task import Clock
from checkmate.solvers.search.any_order import AnyOrder
from checkmate.solvers.search.backward_search import find_plan, refute
from checkmate.solvers.search.drop_runs import drop_runs_of
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.test_every_plan import random_chain
from tests.support.all_plans import cheapest_plan, random_dag
from tests.support.oracle import all_schedules, random_problem, random_problem_with_overwrites, random_problem_with_ways
from tests.support.sampling import in_turn, long, slow

KINDS = [random_dag, random_problem, random_problem_with_ways, random_problem_with_overwrites, random_chain]


@in_turn(make=KINDS, first=[0, *map(long, range(20, 300, 20))])
def test_it_finds_a_plan_exactly_where_one_fits(make: Callable[[int], Problem], first: int) -> None:
    for seed in range(first, first + 20):
        problem = make(seed)
        sets, least = ValueSets(problem), int(problem.unavoidable_bytes.max())
        for budget in range(least, min(problem.keep_all_peak, least + 4)):
            search = AnyOrder(sets, budget, Clock())
            runs, fits = search.runs(), cheapest_plan(problem, budget)[1] is not None
            assert search.complete
            assert (runs is not None) == fits
            assert runs is not None or search.least > budget
            if runs is not None:
                assert check_plan(lower_runs(problem, runs), problem, budget) == []
                fewer = drop_runs_of(problem, budget, runs, Clock())
                assert check_plan(lower_runs(problem, fewer), problem, budget) == []
                assert sum(map(len, fewer)) <= sum(map(len, runs))
            proofs = [AnyOrder(sets, budget, Clock(), loose=True).refutes(t) for t in range(sets.T)]
            assert not (fits and any(proofs))


@in_turn(make=[random_problem, random_problem_with_ways], seed=[*range(15), *map(long, range(15, 40))])
def test_a_schedule_lowered_by_its_runs_is_the_same_plan(make: Callable[..., Problem], seed: int) -> None:
    problem = make(seed, most_ops=4)
    for schedule in all_schedules(problem):
        plan = lower(problem, schedule)
        if not check_plan(plan, problem):
            stages = [[k for k in range(t + 1) if schedule.R[t, k]] for t in range(len(schedule.R))]
            assert lower_runs(problem, stages) == plan
            assert plan.is_a_schedule


@pytest.mark.parametrize("make", [slow(dags.vgg), slow(dags.resnet), long(dags.unet), long(dags.mobilenet)])
def test_on_training_steps_it_fits_where_a_schedule_does_and_proves_as_much(make: Callable[[], Problem]) -> None:
    problem = make()
    sets, width = ValueSets(problem), 64
    for share in (1.0, 1.05, 1.3):
        budget = int(share * problem.unavoidable_bytes.max())
        R, _ = find_plan(sets, budget, width=width, clock=Clock())
        runs = AnyOrder(sets, budget, Clock()).runs()
        assert R is None or runs is not None
        if runs is not None:
            assert simulate(lower_runs(problem, runs), problem).peak <= budget
        for t in range(0, sets.T, 7):
            search = AnyOrder(sets, budget, Clock(), loose=True)
            if search.refutes(t):
                assert R is None
                assert refute(sets, budget, t, width=width, clock=Clock()) is not None


def test_what_runs_twice_in_a_stage_is_said_by_the_stages_alone() -> None:
    five = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])
    runs = AnyOrder(ValueSets(five), 8, Clock()).runs()
    plan, schedule = lower_runs(five, runs), Schedule.from_runs(five.graph, as_matrix(runs))
    assert (check_plan(plan, five, 8), plan.is_a_schedule) == ([], False)
    assert simulate(lower(five, schedule), five).peak > 8


def test_it_ends_with_its_clock_and_its_states_and_proves_nothing_then() -> None:
    sets = ValueSets(dags.unet())
    budget = int(1.05 * sets.problem.unavoidable_bytes.max())
    for search in (AnyOrder(sets, budget, Clock(0.0)), AnyOrder(sets, budget, Clock(), most=3)):
        assert search.runs() is None
        assert not search.complete
        assert not search.refutes(sets.T - 1)
