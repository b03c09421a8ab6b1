"""Make a Solution of the ops that a method chose to run: lowered to a plan, verified and simulated."""

from __future__ import annotations

import logging

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status
from checkmate.errors import SolverError

TOLERANCE = 1e-4  # a bound may exceed a cost by this share of it, from the tolerances of solvers
log = logging.getLogger("checkmate.solve")


def certify(
    problem: Problem, budget: int, found: np.ndarray | Plan, *, method: str, bound: float = 0.0, **fields: object
) -> Solution:
    """The Solution that runs R (T, T), or a plan, of which R may not say all; verified and simulated.

    The bound is raised to the cost of running each op once, which every plan takes; one that this schedule
    contradicts was no proof, and does not count. OPTIMAL where the bound meets the cost within `OPTIMAL_GAP`.

    Raises:
        SolverError: if it breaks a rule or exceeds a budget; the method is wrong then, not the problem.
    """
    if isinstance(found, Plan):
        plan, schedule = found, Schedule.of_plan(problem.graph, found)
    else:
        schedule = Schedule.from_runs(problem.graph, found)
        plan = simulator.without_slower_ways(simulator.lower(problem, schedule), problem, budget)
    if wrong := simulator.verify(plan, problem, budget):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SolverError(f"The schedule of {method} is wrong: {wrong[0]}{more}.")
    cost = simulator.cost(plan, problem)
    if contradicts(bound, cost):
        log.warning("a bound of %s, %.6g s, was wrong: a verified schedule takes %.6g s", method, bound, cost)
        bound = problem.least_cost
    T = len(problem.graph.ops)
    one_clock = not plan.sent and not problem.graph.links
    runs_once = one_clock and len(plan.runs) == T  # the least there is, whatever is lost in its sum
    bound = max(problem.least_cost, bound)  # in this order, what is no number is no bound
    bound = cost if runs_once else min(bound, cost)
    status = Status.OPTIMAL if cost - bound <= OPTIMAL_GAP * cost else Status.FEASIBLE
    peak = simulator.simulate(plan, problem).peak
    return Solution(status, problem, budget, method, schedule, plan, cost, bound, peak, **fields)  # type: ignore[arg-type]


def again(known: Solution, problem: Problem, budget: int, *, bound: float = 0.0, **fields: object) -> Solution:
    """The plan of a solution, certified anew for this problem and budget.

    Raises:
        SolverError: if it breaks a rule there or exceeds a budget.
    """
    assert known.schedule is not None
    about = {"method": known.method, **fields}
    found = known.schedule.R if known.plan is None or known.plan.is_a_schedule else known.plan
    return certify(problem, budget, found, bound=bound, **about)  # type: ignore[arg-type]


def contradicts(bound: float, cost: float) -> bool:
    """Whether a lower bound cannot be true if a schedule has this cost, beyond what solvers round."""
    return bound > cost * (1 + TOLERANCE)
