"""Last node: keep only what the op before made, and make everything else again. The most recomputation there is.

Nothing is chosen, so it is a yardstick and not a method to train with: the training step of a chain, n ops, runs some
n² / 8 of them, and with residual connections gradients run again too, up to n² / 2. It is not the least memory either:
what an op misses is made again as a whole, and on branches that can be more than was let go.

Solving takes time in proportion to the runs: for a chain of 1,601 ops, with 322,001 runs, some 5 seconds; for one of
3,401 ops, with 1.4 million, some 20.
"""

from __future__ import annotations

from checkmate.solvers.baselines.sweep import cheapest
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import on_demand
from checkmate.solvers.common.task import Task

METHOD = "last-node"


def last_node(task: Task, incumbent: Incumbent) -> Remarks:
    """After each op keep only its outputs. No plan where that exceeds the budget, which it does not adapt to.

    Results of the step and values of pinned ops stay too, as in every method.

    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> solve(chain, 3, method="last-node").cost
    8.0
    """
    last = {t: op.outputs for t, op in enumerate(task.problem.graph.ops)}
    sweep = cheapest(task, incumbent, METHOD, 1, lambda _: on_demand(task.problem, last), tries=1)
    return sweep.remarks({}, remedy=", and it has no other schedule")
