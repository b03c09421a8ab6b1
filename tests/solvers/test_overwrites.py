"""Whole steps, whose updates overwrite what gradients read: the best plans, and gradients made twice."""

from __future__ import annotations

import pytest

from checkmate import Status, min_budget, solve
from tests.solvers.checks import wrong
from tests.solvers.steps import whole_step


@pytest.mark.parametrize("clipped", [False, True])
def test_auto_is_as_good_as_the_exact_model_on_whole_steps(clipped: bool) -> None:
    problem = whole_step(3, clipped=clipped)
    ends = min_budget(problem)
    assert ends.proven
    for budget in sorted({ends.peak, ends.peak + 1, (ends.peak + problem.keep_all_peak) // 2}):
        exact, auto = (solve(problem, budget, method=method, time_limit=20) for method in ("milp", "auto"))
        assert exact.status is Status.OPTIMAL
        assert auto.cost == pytest.approx(exact.cost, rel=2e-4)
        assert exact.bound <= auto.cost * (1 + 1e-6)
    assert solve(problem, ends.peak - 1, method="milp").status is Status.INFEASIBLE


def test_gradients_that_wait_for_their_norm_are_made_a_second_time() -> None:
    """No plan that makes gradients once fits what all of them take; one that makes them twice fits far less."""
    problem, gradients = whole_step(8, clipped=True), 20 * 8
    assert problem.keep_all_peak > gradients > 4 * min_budget(problem, time_limit=5).peak
    plan = solve(problem, gradients // 3, time_limit=2)
    again = [op.name for op, times in zip(problem.graph.ops, plan.schedule.recomputed, strict=True) if times]
    assert sum(name.startswith("gradient") for name in again) >= 4
    assert plan.cost < 2 * problem.keep_all_cost
    assert not wrong(problem, plan.schedule.R, gradients // 3)
