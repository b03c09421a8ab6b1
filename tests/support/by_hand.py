"""Schedules and plans by hand: each op runs in its own stage, and op k again in stage t for each (t, k) named."""

from __future__ import annotations

import numpy as np

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import lower
from checkmate.core.solution import Solution
from checkmate.solvers.common.incumbent import certify


def runs_of(problem: Problem, *again: tuple[int, int]) -> np.ndarray:
    R = np.eye(len(problem.graph.ops), dtype=bool)
    for t, k in again:
        R[t, k] = True
    return R


def schedule_of(problem: Problem, *again: tuple[int, int]) -> Schedule:
    return Schedule.from_runs(problem.graph, runs_of(problem, *again))


def plan_of(problem: Problem, *again: tuple[int, int]) -> Plan:
    return lower(problem, schedule_of(problem, *again))


def solution_of(problem: Problem, *again: tuple[int, int], plan: Plan | None = None, budget: int = 10**6) -> Solution:
    """The solution of that, or of any plan."""
    return certify(problem, budget, plan or runs_of(problem, *again), method="by hand")


def random_runs(problem: Problem, seed: int) -> np.ndarray:
    """Any R that `Schedule.from_runs` can complete: each op in its stage, others before it, pinned ones not again."""
    rng, n = np.random.default_rng(seed), len(problem.graph.ops)
    R = np.tril(rng.random((n, n)) < rng.random()) | np.eye(n, dtype=bool)
    pinned = [k for k, op in enumerate(problem.graph.ops) if op.pinned]
    R[:, pinned] = np.eye(n, dtype=bool)[:, pinned]
    return R


def random_schedule(problem: Problem, seed: int) -> Schedule:
    return Schedule.from_runs(problem.graph, random_runs(problem, seed))
