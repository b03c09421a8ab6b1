"""Many passes of eviction: with a grid of weights, improved by local search; and a random search over such passes.

An upper bound that scales: one pass (`checkmate.solvers.search.eviction`) takes milliseconds, and a step of a thousand
operations has its first plan in a fraction of a second.

Close to the smallest budget the order of evictions decides, and no formula for it is right everywhere. So each value's
worth in the pass is multiplied by a factor of its own, its tilt, drawn at random. A change counts if the pass it gives
is no dearer; large values are tried more often, since they decide what fits. A few plans are improved side by side, and
from time to time the worst of them starts over from the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import as_matrix, cost_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search.eviction import Stuck, Weights, run_pass
from checkmate.solvers.search.exchange import exchange
from checkmate.units import format_bytes

METHOD = "next-use"
PASSES_TAKE = 0.5  # of the time, at most
FIRST_TAKES = 3.0  # seconds that the first pass may take, however little time there is
CLEARLY = 0.99  # of the seconds of the best pass so far: what takes less is offered at once
MOST_IMPROVED = 3  # plans that local search starts from
GRID = tuple(Weights(a, b, c) for b, c, a in itertools.product((1.0, 0.5), (0.5, 0.0, 1.0, 2.0), (1.0, 0.5, 2.0)))
POOL = 6  # plans improved side by side
ROUND = 200  # passes, after which the worst plan starts over from the best
COUNTS = (1, 2, 4, 8, 16)  # values tilted at once
STEPS = (1.0, 3.0)  # standard deviations of a tilt, in the logarithm
QUIET = 12  # rounds without progress after which the search over tilts ends


def next_use(task: Task, incumbent: Incumbent) -> Remarks:
    """The best plan of many passes, improved by local search. No plan where no pass fits.

    Passes take half of the time at most. The same seed gives the same plan where the time limit does not bind.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, 3, method="next-use").cost
    4.0
    """
    problem, tables, clock = task.problem, Tables.of(task.problem), task.clock.share(PASSES_TAKE)
    best: list[tuple[float, list[list[int]]]] = []  # the cheapest first: seconds, and per stage the ops that run
    passes = 0
    for weights in GRID:
        pass_clock = clock if passes else Clock(max(FIRST_TAKES, clock.left))
        stages, passes = run_pass(tables, task.budget, weights, pass_clock), passes + 1
        if isinstance(stages, Stuck):
            stuck = stages
        else:
            cost = tables.seconds_of(stages)
            if not best or cost < CLEARLY * best[0][0]:
                incumbent.offer(as_matrix(stages), METHOD)  # a usable plan at once
            if all(abs(cost - known) > 1e-9 * known for known, _ in best):
                best = sorted([*best, (cost, stages)], key=lambda plan: plan[0])[:MOST_IMPROVED]
        if clock.is_over:
            break
    if not best:
        op, short = problem.graph.ops[stuck.op].name, format_bytes(stuck.missing_bytes)
        return Remarks(f"every pass was stuck; the last at {op}, {short} short", stuck=stuck.op)
    _improve(task, incumbent, [as_matrix(stages) for _, stages in best])
    return Remarks(details={"passes": passes, "best pass": best[0][0]})


def _improve(task: Task, incumbent: Incumbent, plans: Sequence[np.ndarray]) -> None:
    """Local search from the best passes, and once more from the best that comes of it."""
    problem, R = task.problem, plans[0]
    incumbent.offer(R, METHOD)
    if cost_of(problem, R) <= problem.keep_all_cost * (1 + 1e-12):
        return
    for start, quiet in [*((plan, 4) for plan in plans), (None, 20)]:
        if task.clock.is_over:
            break
        found = exchange(task, R if start is None else start, quiet=quiet)
        if cost_of(problem, found) < cost_of(problem, R):
            R = found
            incumbent.offer(R, METHOD)


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

    >>> from checkmate.core.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> Tilts(Task(problem, 3)).search(Clock(1.0)).sum(axis=0)
    array([1, 1, 1, 1])
    """

    def __init__(self, task: Task) -> None:
        self.tables = tables = Tables.of(task.problem)
        self.budget = task.budget
        self.rng = np.random.default_rng(task.seed)
        self.first = [*GRID]  # weights still to be tried as they are
        self.pool: list[_Plan] = []  # the cheapest first
        bytes_that_go = [
            size if users and not result and made_by >= 0 and not tables.pinned[made_by] else 0
            for size, users, result, made_by in zip(
                tables.size, tables.users, tables.result, tables.producer, strict=True
            )
        ]
        self.chances = np.array(bytes_that_go) / max(1, sum(bytes_that_go))  # (V,): how likely each is changed

    def search(self, clock: Clock) -> np.ndarray | None:
        """R (T, T) bool, the runs of the cheapest pass that was found, or None where none fits the budget.

        It ends before the clock is over after rounds without progress.
        """
        while self.first and not clock.is_over:
            self.pool += self._pass(self.first.pop(0), np.zeros(len(self.chances)))
        self.pool = sorted(self.pool, key=lambda plan: plan.cost)[:POOL]
        if not self.pool:
            return None
        quiet = 0  # rounds without progress
        while self.chances.any() and quiet < QUIET and not clock.is_over:
            best = self.pool[0].cost
            for _ in range(ROUND):
                self._change(int(self.rng.integers(len(self.pool))))
                if clock.is_over:
                    break
            self.pool.sort(key=lambda plan: plan.cost)
            quiet = 0 if self.pool[0].cost < best * (1 - 1e-9) else quiet + 1
            self.pool[-1] = self.pool[0]
        return as_matrix(self.pool[0].stages)

    def _change(self, i: int) -> None:
        """Change a few values of a plan at random; it stays so if the pass it gives is no dearer."""
        plan = self.pool[i]
        changed = self.rng.choice(len(self.chances), self.rng.choice(COUNTS), p=self.chances)
        tilt = plan.tilt.copy()
        tilt[changed] += self.rng.normal(0.0, self.rng.choice(STEPS), len(changed))
        for found in self._pass(plan.weights, tilt):
            if found.cost <= plan.cost:
                self.pool[i] = found

    def _pass(self, weights: Weights, tilt: np.ndarray) -> list[_Plan]:
        """The plan of one pass, if it fits."""
        stages = run_pass(self.tables, self.budget, replace(weights, tilt=np.exp(tilt)))
        return [] if isinstance(stages, Stuck) else [_Plan(self.tables.seconds_of(stages), weights, tilt, stages)]
