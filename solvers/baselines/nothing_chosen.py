"""Two yardsticks that choose nothing: keep everything, and keep only what the op before made.

Keeping everything, each op runs once, each value stays until its last use: what PyTorch does by itself.

Last node makes everything else again, the most recomputation there is. It is a yardstick and not a method to train
with: the training step of a chain, n ops, runs some n² / 8 of them, and with residual connections gradients run again
too, up to n² / 2. It is not the least memory either: what an op misses is made again as a whole, and on branches that
can be more than was let go.

Solving that takes time in proportion to the runs: for a chain of 1,601 ops, with 322,001 runs, some 5 seconds; for one
of 3,401 ops, with 1.4 million, some 20.
"""

from __future__ import annotations

import numpy as np

from checkmate.solvers.baselines.sweep import cheapest
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import on_demand
from checkmate.solvers.common.task import Task
from checkmate.units import format_bytes


def checkpoint_all(task: Task, incumbent: Incumbent) -> Remarks:
    """Run each op once, where that fits the budget.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> solve(problem, 8, method="checkpoint-all").cost
    2.0
    """
    if incumbent.offer(np.eye(len(task.problem.graph.ops), dtype=bool), "checkpoint-all"):
        return Remarks(method="checkpoint-all")
    return Remarks(f"keeping everything takes {format_bytes(task.problem.keep_all_peak)}")


def last_node(task: Task, incumbent: Incumbent) -> Remarks:
    """After each op keep only its outputs. No plan where that exceeds the budget, which it does not adapt to.

    Results of the step and values of pinned ops stay too, as in every method.

    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> solve(chain, 3, method="last-node").cost
    8.0
    """
    last = {t: op.outputs for t, op in enumerate(task.problem.graph.ops)}
    sweep = cheapest(task, incumbent, "last-node", 1, lambda _: on_demand(task.problem, last), tries=1)
    return sweep.remarks({}, remedy=", and it has no other schedule")
