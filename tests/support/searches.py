"""What searches make of a schedule, to hold each answer against all schedules there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search.adapt import adapt
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.greedy import TiltedPasses
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.neighbourhoods import Neighbourhoods


def found_from(task: Task, dearest: np.ndarray, every: Sequence[np.ndarray]) -> Iterator[np.ndarray | None]:
    """The answers of searches that begin with a schedule.

    Args:
        dearest: of the schedules within the budget, that with the most runs.
        every: all schedules, within the budget or not.
    """
    yield exchange(task, dearest)
    yield drop_runs(task.problem, task.budget, dearest, Clock(1.0))
    yield adapt(task, dearest)
    yield adapt(task, max(every, key=lambda R: float(R.sum())))
    yield TiltedPasses(task).search(Clock(0.05))
    yield Neighbourhoods(task).search(dearest, Clock(0.2))
