"""Keep everything: each op runs once, each value stays until its last use. What PyTorch does by itself."""

from __future__ import annotations

import numpy as np

from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Task
from checkmate.units import format_bytes

METHOD = "checkpoint-all"


def checkpoint_all(task: Task, incumbent: Incumbent) -> Remarks:
    """Run each op once, where that fits the budget.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> solve(problem, 8, method="checkpoint-all").cost
    2.0
    """
    if incumbent.offer(np.eye(len(task.problem.graph.ops), dtype=bool), METHOD):
        return Remarks(method=METHOD)
    return Remarks(f"keeping everything takes {format_bytes(task.problem.keep_all_peak)}")
