"""Improve the best plan of `auto` by beam searches beside it, each with randomly drawn prices of memory.

What a byte is worth in which stage nobody knows: where the plan is close to the budget it is worth more. So the prices
are drawn at random around that, again and again, and the beams become wider as narrow ones find nothing more. What a
beam finds is improved by exchanges of single runs, and is the plan to go along with from then on.
"""

from __future__ import annotations

import numpy as np

from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import bytes_in_stages, cost_of, obeys_limits
from checkmate.solvers.search.backward_beam import Beam, prices
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.value_sets import ValueSets

FIRST_WIDTH, WIDER, WIDEST = 16, 2, 2048  # states of the first beams, how many times as many then, and at most
ROUND = 4  # beams without progress, after which they become wider
POWERS = (1.0, 2.0, 4.0, 16.0)  # of how full a stage is: what a byte is worth there
WORTHS = (2.0, 60.0)  # times the forward: all bytes in all stages, at least and at most
NOISES = (0.0, 0.5, 1.0)  # standard deviations, in the logarithm, of the price of each value
SHARE_OF_EXCHANGE = 0.25  # of the time left


class Detours:
    """The state of the search; each call of `search` continues it.

    Args:
        task: its seed is that of what is drawn. The same seed gives the same plans where no clock binds.

    >>> from checkmate.core.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> everything = np.tril(np.ones((4, 4), dtype=bool))
    >>> Detours(Task(problem, 3)).search(everything, Clock(1.0)).sum(axis=0)
    array([1, 1, 1, 1])
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sets = ValueSets(task.problem)
        self.rng = np.random.default_rng(task.seed)
        self.width = FIRST_WIDTH

    @property
    def is_over(self) -> bool:
        """Tell whether beams of full width have found nothing more."""
        return self.width > WIDEST

    def search(self, R: np.ndarray, clock: Clock) -> np.ndarray:
        """A schedule (T, T) within the budget, no dearer than R, which is within the budget too."""
        problem, budget, rng, quiet = self.task.problem, self.task.budget, self.rng, 0
        forward = problem.seconds[: problem.graph.forward_length].sum()
        while not clock.is_over and not self.is_over:
            # Draw prices around how full each stage is.
            worth = (bytes_in_stages(problem, R)[0] / budget) ** rng.choice(POWERS)
            worth *= np.exp(rng.uniform(*np.log(WORTHS))) * forward / (problem.keep_all_peak * worth.sum())
            price = prices(self.sets, budget, worth)
            price *= np.exp(rng.normal(0.0, rng.choice(NOISES), (len(price), 1))).astype(np.float32)
            found = Beam(self.sets, budget, self.width, price, clock).search(R)
            better = found is not None and cost_of(problem, found) < cost_of(problem, R) * (1 - 1e-9)
            # a beam knows not how often an op has run
            if found is not None and better and obeys_limits(problem, found):
                R, quiet = exchange(self.task.within(SHARE_OF_EXCHANGE * clock.left), found), 0
            else:
                quiet += 1
            if quiet == ROUND:
                self.width, quiet = WIDER * self.width, 0
        return R
