"""A plan with fewer runs: it fits, it never costs more, and where there is room nothing runs twice."""

from __future__ import annotations

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Clock, Task, certify
from checkmate.solvers.common.schedules import as_matrix, as_stages, cost_of, peak_of
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.moment_model import build
from checkmate.solvers.search.backward_search import find_plan
from checkmate.solvers.search.drop_runs import GuidedPasses, drop_runs
from checkmate.solvers.search.min_budget import small_plan
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.checks import runs, wrong
from tests.solvers.steps import FIVE
from tests.support.oracle import PLAIN_AND_WAYS, Make, all_schedules
from tests.support.paper_equations import violations
from tests.support.sampling import every, in_turn

SECONDS = 60.0  # not reached: the searches end by themselves


def dropped(problem: Problem, budget: int, R: np.ndarray) -> np.ndarray:
    return as_matrix(drop_runs(problem, budget, as_stages(R), Clock()))


@pytest.mark.slow
@in_turn(make=PLAIN_AND_WAYS, seed=every(8, range(40)))
def test_any_valid_schedule_becomes_no_dearer_and_fits_what_it_fitted(make: Make, seed: int) -> None:
    problem = make(seed, most_ops=4)
    pinned = [op.pinned is not None for op in problem.graph.ops]
    for schedule in all_schedules(problem):
        if (schedule.recomputed[pinned] > 0).any() or violations(schedule, problem):
            continue
        peak = peak_of(problem, schedule.R)
        slimmer = certify(problem, peak, dropped(problem, peak, schedule.R), method="drop_runs")
        assert slimmer.cost <= cost_of(problem, schedule.R) + 1e-9


def test_more_room_makes_it_cheaper_on_a_training_step_and_with_room_for_all_nothing_runs_twice() -> None:
    problem = dags.gpt(2)
    budget = int(1.3 * problem.unavoidable_bytes.max())
    R, _ = find_plan(ValueSets(problem), budget, width=4, clock=Clock())
    tight, wide, all_fits = (dropped(problem, at, R) for at in (budget, 2 * budget, 2 * problem.keep_all_peak))
    assert (wrong(problem, tight, budget), wrong(problem, wide, 2 * budget)) == ([], [])
    assert cost_of(problem, wide) <= cost_of(problem, tight) < cost_of(problem, R)
    assert np.array_equal(all_fits, runs(problem))


def test_what_is_written_over_leaves_room_for_others() -> None:
    """Only where op 2 writes over what it reads is there room to keep the value of op 0.

    Of two values it has room only if one of both goes with it; what the plan makes again in the end needs not be both.
    """
    problem = Problem.from_dag([[], [], [1], [0, 2]], [1] * 4, [4, 4, 4, 0], over={2: [1]})
    assert dropped(problem, 8, runs(problem, (3, 0))).sum() == 4
    deps: list[list[int]] = [[], [], [0, 1], [0, 2], [1, 3]]
    problem = Problem.from_dag(deps, [1] * 5, [4, 4, 4, 0, 0], workspace=[0, 0, 4, 0, 0], over={2: [0, 1]})
    found = dropped(problem, 12, runs(problem, (3, 0), (4, 1)))
    assert (peak_of(problem, found), found.sum()) == (12, 6)


def test_a_value_that_goes_in_the_middle_of_a_stage_and_is_made_again_there() -> None:
    """Op 0's value is there when the last stage begins, and has to go while op 2 runs, beside what op 1 made."""
    for budget in (8, 9, 10, 12):
        fewer = drop_runs(FIVE, budget, [[0], [0, 1], [0, 1, 2], [0, 3], [1, 2, 0, 4]], Clock())
        assert wrong(FIVE, fewer, budget) == []


def guided(problem: Problem, budget: int, *, trust: float) -> GuidedPasses:
    """Passes beside a plan of a small peak that a relaxation with moments in each stage guides, or nothing does."""
    moments = [*range(problem.graph.forward_length, len(problem.graph.ops))]
    x = build(problem, budget, moments)
    kept = trust * x.model.value(highs.run(x.model, relax=True).x, x.X)
    return GuidedPasses(Task(problem, budget), small_plan(problem, budget, Clock()), moments, kept)


def test_what_a_relaxation_keeps_makes_passes_cheaper() -> None:
    problem = dags.resnet()
    budget = int(1.02 * checkmate.min_budget(problem).peak)
    costs = []
    for trust in (0.0, 1.0):
        search = guided(problem, budget, trust=trust)
        R = as_matrix(search.plain(Clock(SECONDS)))
        assert wrong(problem, R, budget) == []
        costs.append(cost_of(problem, R))
    assert costs[1] < costs[0]


def test_the_same_seed_gives_the_same_plans_and_a_later_search_gives_others() -> None:
    problem = dags.unit_chain(8)
    first, second = (guided(problem, 4, trust=1.0) for _ in range(2))
    plans = first.search(Clock(SECONDS))
    assert plans == second.search(Clock(SECONDS))
    costs = [cost_of(problem, as_matrix(plan)) for plan in plans]
    assert costs == sorted(costs)
    later = first.search(Clock(SECONDS))
    assert all(plan not in plans for plan in later)
