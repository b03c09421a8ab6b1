"""Random search over passes of eviction: each value's worth in the pass is multiplied by a factor of its own, its tilt.

Close to the smallest budget the order of evictions decides, and no formula for it is right everywhere. A change counts
if the pass it gives is no dearer; large values are tried more often, since they decide what fits. A few plans are
improved side by side, and from time to time the worst of them starts over from the best.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.runs import as_matrix
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search.eviction import Stuck, Weights, run_pass
from checkmate.solvers.search.next_use import Guide, variants

POOL = 6  # plans improved side by side
ROUND = 200  # passes, after which the worst plan starts over from the best
COUNTS = (1, 2, 4, 8, 16)  # values changed at once
STEPS = (1.0, 3.0)  # standard deviations of a change, in the logarithm
QUIET = 12  # rounds without progress after which the search ends


@dataclass
class _Plan:
    cost: float  # seconds
    weights: Weights
    tilt: np.ndarray  # (V,) float64, logarithms
    stages: list[list[int]]


class Tilts:
    """The plans so far; `search` can be called again and goes on from them.

    Args:
        task: its seed is that of the changes. The same seed gives the same plans where no clock binds.
        guide: what a bound's answer keeps; half of the first passes follow it.

    >>> from checkmate.core.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> Tilts(Task(problem, 3)).search(Clock(1.0)).sum(axis=0)
    array([1, 1, 1, 1])
    """

    def __init__(self, task: Task, guide: Guide | None = None) -> None:
        self.tables, self.budget = Tables.of(task.problem), task.budget
        self.rng = np.random.default_rng(task.seed)
        self.chances = _chances(self.tables)
        self.first = [*variants(None), *(variants(guide) if guide else ())]  # weights still to be tried as they are
        self.pool: list[_Plan] = []  # the cheapest first
        self.quiet = 0  # rounds without progress

    def search(self, clock: Clock) -> np.ndarray | None:
        """R (T, T) bool, the runs of the cheapest pass that was found, or None where none fits the budget.

        It ends before the clock is over after rounds without progress.
        """
        while self.first and not clock.is_over:
            self.pool += _plan(self.tables, self.budget, self.first.pop(0), np.zeros(len(self.tables.producer)))
        self.pool = sorted(self.pool, key=lambda plan: plan.cost)[:POOL]
        if not self.pool:
            return None
        self.quiet = 0
        while self.chances.any() and self.quiet < QUIET and not clock.is_over:
            best = self.pool[0].cost
            for _ in range(ROUND):
                self._change(int(self.rng.integers(len(self.pool))))
                if clock.is_over:
                    break
            self.pool.sort(key=lambda plan: plan.cost)
            self.quiet = 0 if self.pool[0].cost < best * (1 - 1e-9) else self.quiet + 1
            self.pool[-1] = self.pool[0]
        return as_matrix(self.pool[0].stages)

    def _change(self, i: int) -> None:
        """Change a few values of a plan at random; it stays so if the pass it gives is no dearer."""
        plan = self.pool[i]
        changed = self.rng.choice(len(self.chances), self.rng.choice(COUNTS), p=self.chances)
        tilt = plan.tilt.copy()
        tilt[changed] += self.rng.normal(0.0, self.rng.choice(STEPS), len(changed))
        for found in _plan(self.tables, self.budget, plan.weights, tilt):
            if found.cost <= plan.cost:
                self.pool[i] = found


def _plan(tables: Tables, budget: int, weights: Weights, tilt: np.ndarray) -> list[_Plan]:
    """The plan of one pass, if it fits."""
    stages = run_pass(tables, budget, replace(weights, tilt=np.exp(tilt)))
    if isinstance(stages, Stuck):
        return []
    return [_Plan(tables.seconds_of(stages), weights, tilt, stages)]


def _chances(tables: Tables) -> np.ndarray:
    """(V,) float64: how likely each value is changed, in proportion to its bytes; 0 for those that never go."""
    sizes = [
        size if users and not result and made_by >= 0 and not tables.pinned[made_by] else 0
        for size, users, result, made_by in zip(tables.size, tables.users, tables.result, tables.producer, strict=True)
    ]
    return np.array(sizes) / max(1, sum(sizes))
