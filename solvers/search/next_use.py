"""Many passes that evict what is cheap to bring back and far from its next use, then local search from the best.

An upper bound that scales: one pass (`checkmate.solvers.search.eviction`) takes milliseconds, and a step of a thousand
operations has its first plan in a fraction of a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import as_matrix, cost_of
from checkmate.solvers.common.task import Task
from checkmate.solvers.search.eviction import Stuck, Weights, run_pass
from checkmate.solvers.search.exchange import exchange
from checkmate.units import format_bytes

METHOD = "next-use"
PASSES_TAKE = 0.5  # of the time, at most
MOST_IMPROVED = 3  # plans that local search starts from
GRID = tuple(Weights(a, b, c) for b, c, a in itertools.product((1.0, 0.5), (0.5, 0.0, 1.0, 2.0), (1.0, 0.5, 2.0)))


@dataclass(frozen=True)
class Guide:
    """What another method keeps: up to each stage, values outside its set go first."""

    kept: tuple[tuple[int, np.ndarray], ...]  # (stage, (V,) bool), ascending


def next_use(task: Task, incumbent: Incumbent, *, guide: Guide | None = None) -> Remarks:
    """The best plan of many passes, improved by local search. No plan where no pass fits.

    Args:
        guide: what to keep up to some stages.

    Passes take half of the time at most. The same seed gives the same plan where the time limit does not bind.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, 3, method="next-use").cost
    4.0
    """
    problem, passes = task.problem, Passes(Tables.of(task.problem), task.budget)
    clock, by = task.clock.share(PASSES_TAKE), METHOD if guide is None else f"{METHOD}, guided"
    for weights in variants(guide):
        stages = passes.run(weights)
        if incumbent.R is None and not isinstance(stages, Stuck):
            incumbent.offer(as_matrix(stages), by)  # a usable plan at once
        if clock.is_over:
            break
    if not passes.best:
        assert passes.stuck is not None
        op, short = problem.graph.ops[passes.stuck.op].name, format_bytes(passes.stuck.missing_bytes)
        return Remarks(f"every pass was stuck; the last at {op}, {short} short", stuck=passes.stuck.op)
    _improve(task, incumbent, passes, by)
    return Remarks(details={"passes": passes.count, "best pass": passes.best[0][0]})


def _improve(task: Task, incumbent: Incumbent, passes: Passes, by: str) -> None:
    """Local search from the best passes, and once more from the best that comes of it."""
    problem = task.problem
    cost, stages = passes.best[0]
    R = as_matrix(stages)
    incumbent.offer(R, by)
    if cost <= problem.keep_all_cost * (1 + 1e-12):
        return
    for quiet, start in [(4, as_matrix(stages)) for _, stages in passes.best] + [(20, None)]:
        if task.clock.is_over:
            break
        found = exchange(task, R if start is None else start, quiet=quiet)
        if cost_of(problem, found) < cost_of(problem, R):
            R = found
            incumbent.offer(R, by)


@dataclass
class Passes:
    """The best of the passes so far, the very best first."""

    tables: Tables
    budget: int
    count: int = 0
    best: list[tuple[float, list[list[int]]]] = field(default_factory=list)  # cost, and per stage the ops that run
    stuck: Stuck | None = None

    def run(self, weights: Weights) -> list[list[int]] | Stuck:
        """One pass; its stages, or where it was stuck."""
        self.count += 1
        stages = run_pass(self.tables, self.budget, weights)
        if isinstance(stages, Stuck):
            self.stuck = stages
            return stages
        cost = self.tables.seconds_of(stages)
        if all(abs(cost - known) > 1e-9 * known for known, _ in self.best):
            self.best = sorted([*self.best, (cost, stages)], key=lambda plan: plan[0])[:MOST_IMPROVED]
        return stages


def variants(guide: Guide | None) -> Iterator[Weights]:
    """The grid of weights, with the guide where there is one."""
    for weights in GRID:
        yield weights if guide is None else replace(weights, outside=tuple((t, ~kept) for t, kept in guide.kept))
