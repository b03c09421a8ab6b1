"""Begin from a known plan: of the same step, or of one with the same ops and other sizes, such as a smaller batch.

A plan says what runs, and that is a schedule of any problem with the same graph; only whether it fits is another
question there. So it is carried over in two ways. If it fits it is taken, and what there is room for now need not run
again. And passes of eviction let go first of what the known plan does not keep: this repairs a plan that does not fit.
"""

from __future__ import annotations

import time

import numpy as np

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.runs import as_matrix, cost_of, peak_of
from checkmate.solvers.search.drop_runs import slim
from checkmate.solvers.search.eviction import Stuck
from checkmate.solvers.search.exchange import exchange
from checkmate.solvers.search.next_use import Guide, Passes, variants

Start = Solution | Schedule
PASSES = 4  # of eviction, at most


def as_schedule(problem: Problem, start: Start) -> Schedule:
    """The schedule of a start.

    Raises:
        ValueError: if it has none, or one that is wrong for this problem whatever the budget.
    """
    schedule = start.schedule if isinstance(start, Solution) else start
    if not isinstance(schedule, Schedule):
        raise ValueError(f"A start is a Solution with a plan, or a Schedule, not {start!r}.")
    T = len(problem.graph.ops)
    if schedule.R.shape != (T, T):
        raise ValueError(f"The start is a schedule of {len(schedule.R)} ops, but the problem has {T}.")
    schedule = Schedule.from_runs(problem.graph, schedule.R)
    if wrong := simulator.verify(simulator.lower(problem.graph, schedule), problem):
        raise ValueError(f"The start is a schedule of another problem: {wrong[0]}.")
    return schedule


def proven_by(problem: Problem, budget: int, start: Start) -> float:
    """Seconds that every schedule takes, as the start has proven it; 0.0 where that was for something else.

    A bound holds for the same graph, sizes and costs, and for no more bytes beside what is resident.
    """
    if not isinstance(start, Solution) or fingerprints(start.problem) != fingerprints(problem):
        return 0.0
    return start.bound if budget - problem.resident <= start.budget - start.problem.resident else 0.0


def adapt(problem: Problem, budget: int, R: np.ndarray, *, deadline: float, seed: int = 0) -> np.ndarray | None:
    """The best schedule (T, T) within the budget that is made quickly of a known one; None if none is.

    Args:
        deadline: of `time.perf_counter`. One pass is made even after it.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> adapt(chain, 3, np.tril(np.ones((4, 4), dtype=bool)), deadline=0.0).sum()
    np.int64(4)
    """
    tables = Tables.of(problem)
    found = _passes(problem, tables, budget, R, deadline)
    if (not found or time.perf_counter() < deadline) and peak_of(problem, R) <= budget:
        found.append(slim(problem, budget, R, deadline=deadline))
    if not found:
        return None
    best = min(found, key=lambda runs: cost_of(problem, runs))
    return exchange(problem, tables, budget, best, deadline=deadline, seed=seed)


def _passes(problem: Problem, tables: Tables, budget: int, R: np.ndarray, deadline: float) -> list[np.ndarray]:
    """Passes that let go first of what the schedule does not keep for the next stage; those that fit."""
    kept = Schedule.from_runs(problem.graph, R).S
    guide = Guide(tuple((t, kept[t + 1]) for t in range(len(kept) - 1)))
    passes, found = Passes(tables, budget), []
    for weights, _ in zip(variants(guide), range(PASSES), strict=False):
        stages = passes.run(weights)
        if not isinstance(stages, Stuck):
            found.append(as_matrix(stages))
        if time.perf_counter() > deadline:
            break
    return found
