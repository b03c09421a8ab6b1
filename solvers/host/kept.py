"""Choose the homes of which a copy stays here from call to call: those that the linear bound would keep.

    the linear program of few moments (`checkmate.solvers.linear.moments`), in which each home is kept or not, in part
    -> rounded: the homes with the largest parts, and no more bytes than the program keeps
    -> an op that is left without room then is one more moment, and the program is solved anew

The choice belongs to a problem, and not to a plan: all plans of a step begin and end with the same copies at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.fetches import sendable, with_fetches
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.links import proven_seconds
from checkmate.solvers.linear.moment_model import build
from checkmate.solvers.linear.moments import in_windows

ROUNDS = 6  # moments that are added, at most
LEAST = 0.01  # parts of a home that are none


def keep_homes(task: Task) -> tuple[Problem, float]:
    """The problem with the copies kept that its linear bound keeps, and that bound: seconds whatever is kept.

    No copy is kept, and the bound may be 0.0, where the time is over before the program is solved.

    >>> from checkmate.core.host import Host
    >>> step = Problem.from_dag([[], [0]], [1, 1], [4, 4], parameters=[(8, [0], None), (8, [1], None)])
    >>> there = step.with_host(Host(100, send=8.0, fetch=8.0)).with_homes([2, 3])
    >>> kept, bound = keep_homes(Task(there, 24))
    >>> sorted(kept.kept), round(bound, 2)  # op 0 waits for its parameter, and op 1 does not
    ([2], 2.0)
    """
    problem, bound = task.problem.with_homes(task.problem.homes), 0.0
    at, sizes = in_windows(problem, 1), problem.sizes
    for _ in range(ROUNDS):
        x = build(problem, task.budget, at, choose=True)
        result = highs.run(x.model, relax=True, time_limit=task.clock.left, threads=task.threads)
        bound = max(bound, proven_seconds(problem, result.bound, choose=True))
        if result.x is None or x.links is None:
            break
        # Round: the largest parts first.
        parts, homes = x.model.value(result.x, x.links.kept), list[int]()
        room = float(parts @ sizes)
        for v in np.argsort(-parts, kind="stable").tolist():
            if parts[v] > LEAST and sizes[v] <= room + LEAST:
                homes.append(v)
                room -= int(sizes[v])
        chosen = problem.with_homes(problem.homes, homes)
        # The op that has the least room beside them.
        fetching = with_fetches(chosen, sendable(chosen))
        k = int(np.argmax(fetching.problem.unavoidable_bytes))
        if fetching.problem.unavoidable_bytes[k] <= task.budget:
            return chosen, bound
        plain = [op for op in fetching.op[: k + 1] if op is not None]
        if not plain or plain[-1] in at:
            break
        at = sorted({*at, plain[-1]})
    return problem, bound


@dataclass(frozen=True)
class RoomBound:
    """The seconds that every plan takes with more room, whatever is kept."""

    here: int  # bytes more here
    there: int  # bytes more in the second memory
    bound: float  # seconds; 0.0 where the time was over


def bounds_with_more(problem: Problem, budget: int, here: int, there: int, time_limit: float) -> tuple[RoomBound, ...]:
    """The linear bound as it is, with more bytes here, and with more bytes in the second memory.

    Args:
        time_limit: seconds for each; one takes about a second for 4,000 ops.

    >>> from checkmate.core.host import Host
    >>> step = Problem.from_dag([[], [0]], [1, 1], [4, 4], parameters=[(8, [0], None), (8, [1], None)])
    >>> there = step.with_host(Host(100, send=8.0, fetch=8.0)).with_homes([2, 3])
    >>> [round(row.bound, 1) for row in bounds_with_more(there, 16, here=8, there=5, time_limit=5)]
    [3.0, 2.0, 3.0]
    """
    host, rows = problem.host, list[RoomBound]()
    assert host is not None
    for more, away in ((0, 0), (here, 0), (0, there)):
        roomy = problem.with_host(replace(host, budget=host.budget + away))
        bound = keep_homes(Task(roomy, budget + more, Clock(time_limit)))[1]
        rows.append(RoomBound(more, away, bound))
    return tuple(rows)
