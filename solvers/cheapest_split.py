"""The cheapest plan among a step as it is, and the same step split further and further.

A step that has a plan is not split. Where it has none, the first split that fits may not be the cheapest: one that
holds more beside the rest leaves less room for what need not be recomputed. So the next ones are looked at too, as long
as their ops, each run once, take less time than the plan at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.solvers.common.task import Clock

SHARES = (1 / 2, 1 / 4, 1 / 8)  # of the time limit, for the first splits; those that follow get as much as the last
WORTH = 0.01  # of the cost: so much a further split has to save


def cheapest_split(
    problem: Problem, find: Callable[[Problem, float], Solution], time_limit: float, *, look_on: bool = True
) -> Solution:
    """What is found for the problem, or where that has no plan, the cheapest of what is found for it split further.

    Args:
        find: an answer for a problem as it is, in so many seconds.
        time_limit: seconds for the problem, of which each split has a share.
        look_on: after the first split that has a plan.

    Returns:
        If none has a plan, the last answer.
    """
    best = find(problem, time_limit)
    if best.plan is not None or best.interrupted:
        return best
    clock = Clock(time_limit)
    for i, one in enumerate(islice(problem.and_smaller(), 1, None)):
        rounds = one.rounding > best.problem.rounding  # that is for budgets which nothing else fits
        if best.plan is not None and (clock.is_over or rounds or one.keep_all_cost >= (1 - WORTH) * best.cost):
            break
        found = find(one, SHARES[min(i, len(SHARES) - 1)] * time_limit)
        if best.plan is None or (found.plan is not None and found.cost < best.cost):
            best = found
        if found.interrupted or (best.plan is not None and (not look_on or _is_enough(best))):
            break
    return best


def _is_enough(solution: Solution) -> bool:
    """It recomputes next to nothing; what is split further takes longer."""
    return solution.cost * (1 - WORTH) <= solution.problem.keep_all_cost
