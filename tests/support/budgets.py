"""Budgets of tests, from the plan at hand: bytes, seconds and what runs in parts differ from processor to processor."""

from __future__ import annotations

from checkmate.core.problem import Problem
from checkmate.solvers.search.min_budget import TIME_LIMIT, ends_of, min_budget


def recomputing(problem: Problem, share: float = 0.0, *, time_limit: float = TIME_LIMIT) -> int:
    """A budget in bytes within which each plan of a step runs something again, and nothing in parts.

    Args:
        problem: of the step.
        share: of the way from the smallest such budget to keep-all.
        time_limit: seconds to look for the smallest.
    """
    smallest = ends_of(problem, time_limit=time_limit).peak
    budget = int(smallest + share * (problem.keep_all_peak - smallest))
    assert budget < problem.keep_all_peak, "a plan has no need to run anything again"
    return budget


def between(problem: Problem, share: float, *, time_limit: float = 0.5) -> int:
    """A budget in bytes so far from the smallest that is quickly found to keep-all: 0.0 is the one, 1.0 the other."""
    smallest = min_budget(problem, time_limit=time_limit).peak
    return int(smallest + share * (problem.keep_all_peak - smallest))
