"""What every schedule takes at least, by a search backwards in which states are merged where they are too many.

The search is that of `checkmate.solvers.search.backward_beam`, with each value free to be made again in each stage. Two
states merged need what both need and have taken what the cheaper one has, so nothing is lost that a schedule could do:
the least seconds of a state at the first stage are a bound (a relaxed decision diagram: Bergman, Cire, van Hoeve and
Hooker, 2016). Where nothing had to be merged the cheapest state is the best schedule. Close to the smallest budget few
sets of values fit, and that is where other bounds are far off. Values so small that all of them together do not matter
count as if they were always at hand once made; only a schedule that fits with them as well is offered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.obey import obeys
from checkmate.solvers.common.task import Task
from checkmate.solvers.search.backward_beam import Beam, prices
from checkmate.solvers.search.detours import fullness
from checkmate.solvers.search.min_budget import grain_of
from checkmate.solvers.search.value_sets import Needs

WIDTHS = (64, 256, 1024, 4096)  # states that go on, unmerged: more of them prove more, in more time
BEHIND = 0.25  # of the seconds that are proven to run again: what proves less of them does not catch up when wider
GRAIN = 5e-4  # of the budget: what all values below the grain have together
WORTH = 10.0  # times the forward: the price of all bytes in all stages, that says what is merged


def backward_bound(task: Task, incumbent: Incumbent, *, widths: Sequence[int] = WIDTHS) -> None:
    """Prove what can be proven in time, with more and more states.

    Args:
        widths: how many states go on, unmerged, in one search after another.

    >>> from checkmate.core.problem import Problem
    >>> task = Task(Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4), budget=3)
    >>> incumbent = Incumbent(task)
    >>> backward_bound(task, incumbent)
    >>> incumbent.cost, incumbent.bound
    (4.0, 4.0)
    """
    problem, budget, once = task.problem, task.budget, task.problem.keep_all_cost
    needs = Needs(problem, grain=max(0, grain_of(problem, int(GRAIN * budget))))
    R = np.eye(needs.T, dtype=bool) if incumbent.R is None else incumbent.R
    worth = fullness(problem, budget, R)
    forward = problem.seconds[: problem.graph.forward_length].sum()
    price = prices(needs, budget, WORTH * forward / (problem.keep_all_peak * worth.sum() or 1.0) * worth)
    for width in widths:
        beam = Beam(needs, budget, width, price, task.clock, most=incumbent.cost - once)
        again, found = beam.bound()
        incumbent.prove(once + again)
        if found is not None and obeys(problem, found):
            incumbent.offer(found, "backward bound")
        if again < BEHIND * (incumbent.bound - once):
            return
        if beam.complete or task.clock.is_over or incumbent.cost - incumbent.bound <= task.gap * incumbent.cost:
            return
