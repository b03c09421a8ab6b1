"""The front door: choose a method, solve, and say what happened. Every method certifies its own answer."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np

from checkmate.problem import Problem
from checkmate.solution import Solution, Status
from checkmate.solvers.least import min_budget
from checkmate.solvers.methods import METHODS
from checkmate.units import format_bytes, parse_bytes

__all__ = ["min_budget", "solve"]

log = logging.getLogger("checkmate.solve")


def solve(
    problem: Problem,
    budget: int | float | str,
    *,
    method: str = "auto",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    **options: Any,
) -> Solution:
    """A plan for the problem within the budget, at the least recomputation that the method finds.

    Args:
        budget: bytes, or text such as ``"8 GB"``.
        method: one of `checkmate.solvers.methods.METHODS`.
        time_limit: seconds.
        gap: stop once (cost - bound) / cost is at most this.
        options: of the method.

    Returns:
        A Solution of any status; ``details["min_budget"]`` and ``details["op"]`` where there is no plan.

    Raises:
        BudgetError: if the budget is not a positive number of bytes.
        ValueError: if no method has this name.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, "3 B").cost
    4.0
    """
    began = time.perf_counter()
    if method not in METHODS:
        raise ValueError(f"There is no method {method!r}. The methods are {', '.join(METHODS)}.")
    budget = parse_bytes(budget)
    if budget < problem.unavoidable_bytes.max():
        solution = _infeasible(problem, budget, method)
    else:
        chosen = METHODS[method]
        limits = {"time_limit": time_limit, "gap": gap}
        taken = {name: limit for name, limit in limits.items() if name in chosen.options}
        solution = chosen.run(problem, budget, **taken, **options)
        if solution.plan is None:
            solution = _explain(solution)
    solution = replace(solution, seconds=time.perf_counter() - began)
    log.info("%s", solution)
    return solution


def _infeasible(problem: Problem, budget: int, method: str) -> Solution:
    """No schedule fits because one op alone needs more, with what every schedule holds while it runs."""
    k = int(np.argmax(problem.unavoidable_bytes))
    message = (
        f"No schedule fits {format_bytes(budget)}: {_name(problem, k)} alone needs "
        f"{format_bytes(problem.unavoidable_bytes[k])}. {_way_out(problem)}"
    )
    return _without_plan(Solution(Status.INFEASIBLE, problem, budget, method, bound=float("inf"), message=message), k)


def _explain(solution: Solution) -> Solution:
    """Add to an answer without a plan what would work."""
    problem = solution.problem
    k = int(solution.details.get("stuck", np.argmax(problem.unavoidable_bytes)))
    least = min_budget(problem)
    proven = solution.status is Status.INFEASIBLE
    claim = "No schedule fits" if proven else f"{solution.method} found no schedule within"
    reason = f"{_name(problem, k)} stands in the way" if proven or not solution.message else solution.message
    message = f"{claim} {format_bytes(solution.budget)}: {reason}. "
    message += _way_out(problem) if least > solution.budget else "Method 'auto' has one."
    return _without_plan(replace(solution, message=message), k)


def _without_plan(solution: Solution, k: int) -> Solution:
    details = {**solution.details, "min_budget": min_budget(solution.problem), "op": solution.problem.graph.ops[k].name}
    return replace(solution, details=details)


def _way_out(problem: Problem) -> str:
    least = min_budget(problem)
    return f"Smallest budget that works: {format_bytes(least)} ({least:,} bytes)."


def _name(problem: Problem, k: int) -> str:
    op = problem.graph.ops[k]
    return f"{op.name} ({op.where})" if op.where else op.name
