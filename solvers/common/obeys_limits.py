"""Whether a schedule obeys the limits of its problem, for searches that try many; the certifier looks for itself."""

from __future__ import annotations

import numpy as np

from checkmate.core.problem import Problem


def obeys_limits(problem: Problem, R: np.ndarray) -> bool:
    """Whether no op of R (T, T) runs more often or later than it may, and what a rule has made again is.

    >>> from checkmate.core.rules import with_rules
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4, forward=3)
    >>> again = np.eye(4, dtype=bool)
    >>> again[3, 0] = True
    >>> problem = with_rules(chain, {"op": "recompute"})
    >>> obeys_limits(problem, again), obeys_limits(with_rules(chain, {"op": 1}), again), obeys_limits(chain, again)
    (False, False, True)
    """
    limits = problem.limits
    if problem.rules and (R[:, _pinned(problem)].sum(axis=0) > 1).any():
        return False
    if any(R[:, k].sum() > most for k, most in limits.most_runs.items()):
        return False
    if any(R[last + 1 :, k].any() for k, last in limits.until.items()):
        return False
    return not any(_is_kept(problem, R, v) for v in limits.gone)


def _pinned(problem: Problem) -> list[int]:
    return [k for k, op in enumerate(problem.graph.ops) if op.pinned]


def _is_kept(problem: Problem, R: np.ndarray, v: int) -> bool:
    """Whether an op of the backward, or one that runs again there, reads a value before it is made again."""
    graph, begin = problem.graph, problem.graph.forward_length
    users, producer = list(graph.users[v]), graph.values[v].producer
    read, made = np.flatnonzero(R[begin:, users].any(axis=1)), np.flatnonzero(R[begin:, producer])
    return bool(len(read) and (not len(made) or read[0] < made[0]))
