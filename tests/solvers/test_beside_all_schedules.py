"""Every method, and every part of `auto`, beside all schedules that the verifier lets pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from checkmate.core.solution import Status
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import as_matrix, as_stages, cost_of, obeys_limits, on_demand, peak_of
from checkmate.solvers.linear.moments import moment_bound
from checkmate.solvers.search.adapt import adapt
from checkmate.solvers.search.backward_beam import Beam, detours, prices
from checkmate.solvers.search.drop_runs import GuidedPasses, drop_runs
from checkmate.solvers.search.greedy import GRID, DeadEnd, run_pass
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.min_budget import least_memory, min_budget
from checkmate.solvers.search.neighbourhoods import search_around
from checkmate.solvers.search.value_sets import ValueSets
from checkmate.solvers.solve import FOLLOWS_ALL, solve
from tests.solvers.baselines.test_baselines import OPTIONS
from tests.solvers.checks import begun, check, wrong
from tests.support.oracle import (
    ALL_KINDS,
    Make,
    all_schedules,
    interesting_budgets,
    optimum,
    outcomes,
    random_ruled_problem,
)
from tests.support.sampling import in_turn, long, slow

GENERAL = [
    *((name, {}) for name in FOLLOWS_ALL),
    ("milp", {"formulation": "paper"}),
]


@in_turn(make=ALL_KINDS, seed=[*range(2), *map(slow, range(4, 8)), *map(long, (2, 3, *range(8, 60)))])
def test_methods_are_never_below_the_optimum(make: Make, seed: int) -> None:
    """A plan is verified and costs no less than the best schedule, which what is exact finds; no bound is above it."""
    problem, known = make(seed), outcomes(make(seed))
    of_all, least, ends = min(peak for _, peak in known), least_memory(problem)[1], min_budget(problem)
    assert ends.bound <= of_all <= ends.peak == peak_of(problem, least)
    assert problem.limits.max_runs or ends.proven
    assert not wrong(problem, least)
    ruled = make is random_ruled_problem
    for budget in (budget for budget in interesting_budgets(known) if budget > 0):
        best = optimum(known, budget)
        for method, options in GENERAL if ruled else (*GENERAL, *OPTIONS):
            found, case = solve(problem, budget, method=method, time_limit=5, gap=0.0, **options), (method, options)
            assert found.bound <= best * (1 + 1e-6) or found.status is Status.INFEASIBLE, case
            assert found.cost >= best * (1 - 1e-9), case
            assert (found.status is not Status.INFEASIBLE) or best == np.inf, case
            assert found.plan is None or check(found) is None
            assert "failed" not in found.details, case
            if method == "milp" or (method == "auto" and not ruled):
                assert found.status is (Status.OPTIMAL if best < np.inf else Status.INFEASIBLE), case
                assert found.cost == pytest.approx(best) == pytest.approx(found.bound), case
                assert found.plan or method == "milp" or found.refusal.min_budget == budget + 1


@in_turn(make=ALL_KINDS, seed=[*range(2), *map(long, range(2, 60))])
def test_parts_of_auto_are_never_wrong(make: Make, seed: int) -> None:
    """For the smallest budgets that schedules fit; searches know the schedules that the verifier lets pass."""
    problem, sets = make(seed), ValueSets(make(seed))
    every = [schedule.R for schedule in all_schedules(problem)]
    good = [R for R in every if not wrong(problem, R)]
    pinned = [k for k, op in enumerate(problem.graph.ops) if op.pinned]
    asked = [R for R in every if (R[:, pinned].sum(axis=0) == 1).all()]
    np.testing.assert_array_equal([R for R in asked if obeys_limits(problem, R)], good)
    least = least_memory(problem)[1]
    for budget in sorted({peak_of(problem, R) for R in good})[:3]:
        fitting = [R for R in good if peak_of(problem, R) <= budget]
        dearest, too_large = (max(some, key=lambda R: float(R.sum())) for some in (fitting, every))
        best, incumbent = min(cost_of(problem, R) for R in fitting), begun(problem, budget, 5.0)
        for found in _searched(incumbent.task, dearest, too_large):
            assert found is None or not wrong(problem, found, budget)
        found = detours(incumbent.task.within(0.2), least)
        assert not wrong(problem, found, budget)
        assert cost_of(problem, found) <= cost_of(problem, least)
        assert moment_bound(incumbent.task, incumbent, most=5).value <= best * (1 + 1e-6)
        if make is random_ruled_problem:  # whose rules these do not know of
            continue
        price = prices(sets, budget, np.zeros(sets.T))
        found = Beam(sets, budget, 64, price, Clock(2.0)).search(dearest)
        assert found is None or not wrong(problem, found, budget)
        again, _ = Beam(sets, budget, 4096, price, Clock(5.0)).bound()
        assert problem.keep_all_cost + again == pytest.approx(best)
        for stages in (run_pass(Tables.of(problem), budget, weights) for weights in GRID[:6]):
            until = problem.limits.last_stage
            assert isinstance(stages, DeadEnd) or all(t <= until.get(k, t) for t, ops in enumerate(stages) for k in ops)
    if make is not random_ruled_problem:
        assert not wrong(problem, on_demand(problem, dict.fromkeys(range(sets.T), ())))


def _searched(task: Task, dearest: np.ndarray, too_large: np.ndarray) -> Iterator[np.ndarray | None]:
    """The answers of searches that begin with a schedule within the budget, or with one beyond it."""
    yield as_matrix(exchange(task, as_stages(dearest)))
    yield as_matrix(drop_runs(task.problem, task.budget, as_stages(dearest), Clock(1.0)))
    yield adapt(task, dearest)
    yield adapt(task, too_large)
    kept = np.ones((1, len(task.problem.graph.values)))
    guided = GuidedPasses(task, as_stages(dearest), [len(dearest) // 2], kept)
    yield from map(as_matrix, guided.search(Clock(0.05)))
    yield search_around(task.within(0.2), dearest)
