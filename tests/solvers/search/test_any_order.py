"""The search for what runs again in any order: the truth on all small problems, from both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.simulator import check_plan, lower, lower_runs
from checkmate.solvers.common.incumbent import Clock
from checkmate.solvers.common.schedules import as_matrix, peak_of
from checkmate.solvers.search.backward_search import AnyOrder, find_plan, refute
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.checks import wrong
from tests.solvers.steps import FIVE
from tests.solvers.test_every_plan import random_chain
from tests.support.all_plans import cheapest_plan, random_dag
from tests.support.oracle import ALL_KINDS, PLAIN_AND_WAYS, Make, all_schedules
from tests.support.sampling import in_turn, long, slow

KINDS = [random_dag, random_chain, *ALL_KINDS[:3]]


@in_turn(make=KINDS, first=[0, *map(long, range(20, 300, 20))])
def test_it_finds_a_plan_exactly_where_one_fits(make: Make, first: int) -> None:
    for problem in map(make, range(first, first + 20)):
        sets, least = ValueSets(problem), int(problem.unavoidable_bytes.max())
        for budget in range(least, min(problem.keep_all_peak, least + 4)):
            search = AnyOrder(sets, budget, Clock())
            runs, fits = search.runs(), cheapest_plan(problem, budget)[1] is not None
            assert (search.complete, runs is not None) == (True, fits)
            assert fits or search.least > budget
            if fits:
                fewer = drop_runs(problem, budget, runs, Clock())
                assert wrong(problem, runs, budget) == wrong(problem, fewer, budget) == []
                assert sum(map(len, fewer)) <= sum(map(len, runs))
            proofs = [AnyOrder(sets, budget, Clock(), loose=True).refutes(t) for t in range(sets.T)]
            assert not (fits and any(proofs))


@in_turn(make=PLAIN_AND_WAYS, seed=[*range(15), *map(long, range(15, 40))])
def test_a_schedule_lowered_by_its_runs_is_the_same_plan(make: Callable[..., Problem], seed: int) -> None:
    problem = make(seed, most_ops=4)
    for schedule in all_schedules(problem):
        plan = lower(problem, schedule)
        if not check_plan(plan, problem):
            stages = [[k for k in range(t + 1) if schedule.R[t, k]] for t in range(len(schedule.R))]
            assert lower_runs(problem, stages) == plan
            assert plan.is_a_schedule


@pytest.mark.parametrize("make", [slow(dags.vgg), long(dags.resnet), long(dags.unet), long(dags.mobilenet)])
def test_on_training_steps_it_fits_where_a_schedule_does_and_proves_as_much(make: Make) -> None:
    problem, width = make(), 64
    sets = ValueSets(problem)
    for share in (1.0, 1.05, 1.3):
        budget = int(share * problem.unavoidable_bytes.max())
        R, _ = find_plan(sets, budget, width=width, clock=Clock())
        runs = AnyOrder(sets, budget, Clock()).runs()
        assert R is None or runs is not None
        assert runs is None or wrong(problem, runs, budget) == []
        for t in range(0, sets.T, 7):
            if AnyOrder(sets, budget, Clock(), loose=True).refutes(t):
                assert R is None
                assert refute(sets, budget, t, width=width, clock=Clock()) is not None


def test_what_runs_twice_in_a_stage_is_said_by_the_stages_alone() -> None:
    runs = AnyOrder(ValueSets(FIVE), 8, Clock()).runs()
    assert (wrong(FIVE, runs, 8), lower_runs(FIVE, runs).is_a_schedule) == ([], False)
    assert peak_of(FIVE, as_matrix(runs)) > 8


def test_it_ends_with_its_clock_and_its_states_and_proves_nothing_then() -> None:
    sets = ValueSets(dags.unet())
    budget = int(1.05 * sets.problem.unavoidable_bytes.max())
    for search in (AnyOrder(sets, budget, Clock(0.0)), AnyOrder(sets, budget, Clock(), most=3)):
        assert (search.runs(), search.complete, search.refutes(sets.T - 1)) == (None, False, False)
