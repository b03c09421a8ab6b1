"""The bound by the search backwards: never above the optimum, small values aside too, and optimal where it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search import backward_beam as module
from checkmate.solvers.search.backward_beam import backward_bound
from tests.support.all_plans import least_seconds
from tests.support.oracle import interesting_budgets, outcomes, random_problem
from tests.support.sampling import every, in_turn


def run(
    problem: Problem,
    budget: int,
    *,
    start: np.ndarray | None = None,
    seconds: float = math.inf,
    widths: Sequence[int] = module.WIDTHS,
) -> Incumbent:
    task = Task(problem, budget, Clock(seconds))
    incumbent = Incumbent(task)
    if start is not None:
        assert incumbent.offer(start, "start")
    backward_bound(task, incumbent, widths=widths)
    return incumbent


@in_turn(block=every(8, range(8)), grain=[module.GRAIN, 0.3])
def test_never_above_the_optimum(block: int, grain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a coarse grain much is left out: the bound is lower then, and what breaks the budget is not taken."""
    monkeypatch.setattr(module, "GRAIN", grain)
    for seed in range(10 * block, 10 * block + 10):
        problem = random_problem(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best, found = least_seconds(problem, known, budget), run(problem, budget, widths=(1, 3, 1000))
            assert found.bound <= best + 1e-9
            assert found.cost >= best - 1e-9
            if grain < 0.01 and best < math.inf:
                assert found.cost == pytest.approx(best)


def test_proves_what_the_exact_model_takes_minutes_for() -> None:
    found = run(dags.unit_chain(16), 5)
    assert found.cost == found.bound == 53


def test_ends_where_another_bound_is_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a chain of 33 ops, which takes 53 seconds, 16 states prove 35."""
    chain = dags.unit_chain(16)
    asked: list[int] = []
    bound_of = module.Beam.bound

    def bound(beam: module.Beam) -> tuple[float, list[list[int]] | None]:
        asked.append(beam.width)
        return bound_of(beam)

    monkeypatch.setattr(module.Beam, "bound", bound)
    for proven, tried in ((33.0, [16, 32]), (40.0, [16, 32]), (43.0, [16])):
        task = Task(chain, 5)
        incumbent = Incumbent(task)
        incumbent.prove(proven)
        asked.clear()
        backward_bound(task, incumbent, widths=(16, 32))
        assert asked == tried


def test_proves_that_a_known_plan_is_the_best() -> None:
    chain = dags.unit_chain(8)
    best = run(chain, 4)
    assert best.R is not None
    again = run(chain, 4, start=best.R)
    assert again.cost == again.bound == 26


def test_proves_that_nothing_fits() -> None:
    assert run(dags.unit_chain(8), 2).is_infeasible


def test_proves_nothing_without_time() -> None:
    chain = dags.unit_chain(8)
    assert run(chain, 4, seconds=0.0).bound == chain.keep_all_cost
