"""Which moments the bound of moments looks at: where a plan, or the model's own answer, shows that memory is tight.

A model of few moments lets an op run once between two of them, whenever it likes, and holds no memory in between. So
there are two signs that a moment is missing. Where the plan that the model's answer suggests breaks the budget, the
model holds more than there is room for. And where a plan that fits runs an op twice between two moments, the model pays
for one run only: it cannot prove what the other is for, unless a moment comes between them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule

CLEAR = 3e-3  # of the budget: what breaks it by less is a sign only if nothing breaks it by more
WORTH = 0.01  # of the plan's seconds: a moment that has the model pay less is not worth its variables
ALIKE = 1e-6  # of the plan's seconds


def default_moments(problem: Problem) -> list[int]:
    """Where keeping everything peaks, where most is unavoidable, and before the backward if a rule speaks of that."""
    begin = [problem.graph.forward_length - 1] if problem.limits.gone else []
    return sorted({int(np.argmax(problem.live_bytes)), int(np.argmax(problem.unavoidable_bytes)), *begin})


def where_it_breaks(
    problem: Problem, budget: int, R: np.ndarray, moments: Sequence[int], *, most: int = 1
) -> list[int]:
    """Stages in which a schedule (T, T) breaks the budget: the worst in each of ``most`` gaps between moments.

    Of several those that break it by next to nothing are left out.
    """
    excess = _bytes_in_stages(problem, R)[0] - budget
    excess[list(moments)] = 0
    worst: dict[int, int] = {}  # by how many moments are before it
    for t in np.argsort(-excess, kind="stable").tolist():
        if excess[t] <= (CLEAR * budget if worst else 0) or len(worst) >= most:
            break
        worst.setdefault(bisect.bisect(moments, t), t)
    return list(worst.values())


def where_runs_repeat(problem: Problem, R: np.ndarray, moments: Sequence[int], *, most: int) -> list[int]:
    """Moments, ``most`` at most, that come between runs (T, T) of the same ops, those of the dearest ones first.

    Of moments that are alike in this it is the one at whose first execution the most is at hand.
    """
    T, seconds, cost = len(R), problem.seconds, float(R.sum(axis=0) @ problem.seconds)
    at: list[int] = sorted(moments)
    found: list[int] = []
    fullest = _bytes_in_stages(problem, R)[1]
    gains = np.zeros(T)  # of each stage as a moment: seconds of the ops that run both before and after it in its gap
    for begin, end in zip([0, *(o + 1 for o in at)], [*(o + 1 for o in at), T], strict=True):
        gains[begin:end] = _gains(R[begin:end], seconds)
    while len(found) < most and gains.max() > WORTH * cost:
        best = np.flatnonzero(gains >= gains.max() - ALIKE * cost)
        t = int(best[np.argmax(fullest[best])])
        i = bisect.bisect(at, t)
        begin, end = at[i - 1] + 1 if i else 0, at[i] + 1 if i < len(at) else T
        for some in (slice(begin, t + 1), slice(t + 1, end)):
            gains[some] = _gains(R[some], seconds)
        at.insert(i, t)
        found.append(t)
    return found


def _gains(R: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(n,) seconds of the ops that run up to each of n stages (n, T) and after it."""
    before = np.logical_or.accumulate(R, axis=0)
    after = np.logical_or.accumulate(R[::-1], axis=0)[::-1]
    return np.append((before[:-1] & after[1:]) @ seconds, np.zeros(min(1, len(R))))


def _bytes_in_stages(problem: Problem, R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(T,), (T,) int64: the most bytes at hand in each stage of a schedule, and those while its own op runs."""
    usage = simulator.simulate(simulator.lower(problem, Schedule.from_runs(problem.graph, R)), problem)
    most, own = np.zeros(len(R), dtype=np.int64), np.zeros(len(R), dtype=np.int64)
    stage = 0
    for op, live in zip(usage.ops, usage.bytes_at, strict=True):
        most[stage] = max(most[stage], live)
        if op == stage:
            own[stage], stage = live, stage + 1
    return most, own
