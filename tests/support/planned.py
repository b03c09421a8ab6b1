"""A plan from what is known, or why there is none: what a training asks for before its first step."""

from __future__ import annotations

from typing import Any

from checkmate import Problem, Solution
from checkmate.solvers import known_plans
from checkmate.solvers.solve import refused


def plan(problem: Problem, budget: int, *, time_limit: float = 60.0, **options: Any) -> Solution:
    """What `checkmate.solvers.known_plans.begin` finds; an answer without a plan says why."""
    solution, _ = known_plans.begin(problem, budget, time_limit=time_limit, **options)
    return solution if solution.plan is not None else refused(solution, time_limit=time_limit)
