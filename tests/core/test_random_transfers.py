"""Plans that send values at random are valid, and take no more than the plans that they come from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from checkmate.core.host import Host
from checkmate.core.plan import Drop, Fetch, Free, Plan, Send
from checkmate.core.problem import Problem
from checkmate.core.simulator import check_plan, cost, simulate, without_idle_values
from checkmate.solvers.solve import solve
from tests.support import oracle
from tests.support.transfers import with_transfers


@pytest.mark.parametrize(
    "draw", [oracle.random_problem, oracle.random_problem_with_ways, oracle.random_problem_with_overwrites]
)
def test_plans_with_random_transfers_are_valid(draw: Callable[[int], Problem]) -> None:
    kinds = dict.fromkeys((Send, Fetch, Drop), 0)
    for seed in range(30):
        problem = draw(seed).with_host(Host(10**9, send=3.0, fetch=2.0))
        solution = solve(problem, 10**9, method="next-use")
        assert solution.plan is not None
        plan = with_transfers(problem, solution.plan, np.random.default_rng(seed), share=0.8)
        assert check_plan(plan, problem) == []
        assert simulate(plan, problem).peak <= simulate(solution.plan, problem).peak
        assert cost(plan, problem) >= cost(solution.plan, problem)
        for kind in kinds:
            kinds[kind] += sum(isinstance(step, kind) for step in plan.steps)
    assert kinds[Fetch] > kinds[Send] == kinds[Drop] > 20, kinds


@pytest.mark.parametrize("draw", [oracle.random_problem, oracle.random_problem_with_overwrites])
def test_values_that_plans_forgot_to_let_go_are_let_go(draw: Callable[[int], Problem]) -> None:
    forgotten = 0
    for seed in range(30):
        problem = draw(seed).with_host(Host(10**9, send=3.0, fetch=2.0))
        tight = (problem.keep_all_peak + int(problem.unavoidable_bytes.max())) // 2
        solution = solve(problem, tight, method="next-use")
        if solution.plan is None:
            continue
        plan = with_transfers(problem, solution.plan, np.random.default_rng(seed), share=0.5)
        for i, step in enumerate(plan.steps):
            idle = Plan(plan.steps[:i] + plan.steps[i + 1 :], plan.boundary - (i < plan.boundary))
            if isinstance(step, Free) and not check_plan(idle, problem):
                trimmed = without_idle_values(idle, problem)
                assert check_plan(trimmed, problem) == []
                assert simulate(trimmed, problem).peak <= simulate(plan, problem).peak
                assert cost(trimmed, problem) <= cost(idle, problem)
                assert without_idle_values(trimmed, problem) is trimmed
                forgotten += trimmed != idle
    assert forgotten > 5
