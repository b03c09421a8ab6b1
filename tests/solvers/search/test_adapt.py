"""A known plan to begin with: it is taken where it fits, repaired where not, and never makes an answer worse."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Schedule, Status, solve
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import cost_of, peak_of
from checkmate.solvers.search.adapt import adapt, as_schedule, cheapest_known, proven_by
from tests.solvers.checks import all_runs, runs, takes_less_than, wrong
from tests.support.budgets import recomputing
from tests.support.oracle import best_within, drawn, random_problem
from tests.support.sampling import in_turn


@in_turn(first=range(0, 40, 10))
def test_whatever_the_start_the_optimum_of_small_problems_is_found(first: int) -> None:
    """Starts keep everything, which does not fit, or run everything in every stage."""
    for problem, budget, best in best_within(drawn(random_problem, range(first, first + 10))):
        for R in (runs(problem), all_runs(problem))[: 1 if any(op.pinned for op in problem.graph.ops) else 2]:
            start = Schedule.from_runs(problem.graph, R)
            solution = solve(problem, max(1, budget), gap=0.0, start=start)
            assert solution.cost == pytest.approx(best)
            assert (solution.status is Status.INFEASIBLE) == np.isinf(best)


@pytest.mark.parametrize("size", [6, 12])
def test_the_plan_of_one_batch_is_adapted_to_another(size: int) -> None:
    """Smaller batches have room to spare, larger ones break the budget; both plans are good at once."""
    known, other = dags.resnet((1, 1, 1, 1), batch=8), dags.resnet((1, 1, 1, 1), batch=size)
    first, budget = solve(known, recomputing(known, 0.3), time_limit=5), recomputing(other, 0.3)
    adapted = adapt(Task(other, budget, Clock(0.5)), first.schedule.R)
    assert wrong(other, adapted, budget) == []
    best = solve(other, budget, time_limit=5)
    assert best.gap < 0.01
    assert cost_of(other, adapted) < 1.05 * best.cost


def test_adapting_ends_soon_after_its_time_with_a_plan() -> None:
    problem = dags.gpt(4)
    tight, loose = recomputing(problem, 0.2), recomputing(problem, 0.6)
    known = solve(problem, tight, method="next-use", time_limit=2)
    with takes_less_than(2.0):
        R = adapt(Task(problem, loose, Clock(0.0)), known.schedule.R)
    assert peak_of(problem, R) <= loose


def test_an_optimal_solution_of_the_same_question_is_taken_at_once() -> None:
    problem = dags.resnet((1, 1, 1, 1))
    budget = recomputing(problem, 0.4)
    first = solve(problem, budget, time_limit=10)
    assert first.gap < 1e-4
    again = solve(problem, budget, start=first)
    assert (again.cost, again.bound) == (first.cost, pytest.approx(first.bound))
    assert list(again.details["found"]) == ["start"]


def test_a_bound_counts_for_the_same_costs_sizes_and_no_more_room_only() -> None:
    problem, twin = dags.vgg(6), dags.vgg(6)
    budget = recomputing(problem, 0.4)
    solution = solve(problem, budget, time_limit=2)
    assert proven_by(twin, budget, solution) == proven_by(twin, budget - 1, solution) == solution.bound > 0
    assert proven_by(twin, budget + 1, solution) == proven_by(dags.vgg(6, batch=31), budget, solution) == 0.0
    assert solution.schedule is not None
    assert proven_by(twin, budget, solution.schedule) == 0.0


def test_an_answer_is_never_worse_than_a_start_that_fits() -> None:
    problem = dags.gpt(2)
    budget = recomputing(problem, 0.3)
    good = solve(problem, budget, time_limit=5)
    for method in ("auto", "milp"):
        for time_limit in (0.2, 1e-9):
            found = solve(problem, budget, method=method, time_limit=time_limit, start=good)
            assert found.cost <= good.cost * (1 + 1e-9)


def test_a_start_that_is_none_is_refused() -> None:
    problem = dags.unit_chain(3)
    right = Schedule.from_runs(problem.graph, runs(problem))
    wrong = np.diag([True, True, False, True, True, True, True])
    for start, words in [
        (Schedule(np.eye(3, dtype=bool), np.zeros((3, 3), dtype=bool)), "3 ops, but the problem has 7"),
        (Schedule.from_runs(problem.graph, wrong), "another problem: "),
        (solve(problem, 1), "a Solution with a plan"),
        (wrong, "a Solution with a plan"),
    ]:
        with pytest.raises(ValueError, match=words):
            as_schedule(problem, start)
        for method in ("auto", "milp"):
            with pytest.raises(ValueError, match=words):
                solve(problem, 100, method=method, start=start)
    with pytest.raises(ValueError, match="'chen-sqrt' has no option 'start'"):
        solve(problem, 5, method="chen-sqrt", start=right)


@pytest.mark.parametrize("size", [6, 12])
def test_the_cheapest_known_plan_runs_less_again_where_there_is_room(size: int) -> None:
    known, other = dags.resnet((1, 1, 1, 1), batch=8), dags.resnet((1, 1, 1, 1), batch=size)
    first, budget = solve(known, recomputing(known, 0.1), time_limit=5), recomputing(other, 0.6)
    cheapest, kept = (cheapest_known(other, n, [first]) for n in (budget, other.keep_all_peak))
    assert cheapest is not None
    assert wrong(other, cheapest.schedule.R, budget) == []
    assert other.least_cost < cheapest.cost < cost_of(other, first.schedule.R)
    assert kept is not None
    assert kept.cost == pytest.approx(other.least_cost, rel=1e-12)
    assert cheapest_known(other, 1, [first]) is None
