"""Plans that send values at random are valid, and take no more than the plans that they come from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from checkmate.core.host import Host
from checkmate.core.plan import Drop, Fetch, Send
from checkmate.core.problem import Problem
from checkmate.core.simulator import cost, simulate, verify
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
        assert verify(plan, problem) == []
        assert simulate(plan, problem).peak <= simulate(solution.plan, problem).peak
        assert cost(plan, problem) >= cost(solution.plan, problem)
        for kind in kinds:
            kinds[kind] += sum(isinstance(step, kind) for step in plan.steps)
    assert kinds[Fetch] > kinds[Send] == kinds[Drop] > 20, kinds
