"""Next use: evict what is cheap to bring back and far from its next use, over many weights, then improve the best.

An upper bound that scales: one pass (`checkmate.solvers.search.eviction`) takes milliseconds, and a step of a thousand
operations has its first plan in a fraction of a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.common import incumbent as progress
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.runs import as_matrix
from checkmate.solvers.search.eviction import Stuck, Weights, run_pass
from checkmate.solvers.search.exchange import exchange
from checkmate.units import format_bytes

METHOD = "next-use"
MOST_IMPROVED = 3  # plans that local search starts from
GRID = tuple(Weights(a, b, c) for b, c, a in itertools.product((1.0, 0.5), (0.5, 0.0, 1.0, 2.0), (1.0, 0.5, 2.0)))


@dataclass(frozen=True)
class Guide:
    """What another method keeps: up to each stage, values outside its set go first."""

    kept: tuple[tuple[int, np.ndarray], ...]  # (stage, (V,) bool), ascending


def next_use(
    problem: Problem, budget: int, *, time_limit: float = 10.0, seed: int = 0, guide: Guide | None = None
) -> Solution:
    """The best plan of many passes, improved by local search. NOT_FOUND where no pass fits.

    Args:
        problem: what to schedule.
        budget: bytes.
        time_limit: seconds, half of them at most for passes.
        seed: of the local search.
        guide: what to keep up to some stages.

    The same seed gives the same plan where the time limit does not bind.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> next_use(problem, budget=2).status
    Status.NOT_FOUND
    """
    began = time.perf_counter()
    tables = Tables.of(problem)
    plans = Passes(tables, budget)
    for weights in variants(guide):
        plans.run(weights)
        if time.perf_counter() - began > 0.5 * time_limit:
            break
    seconds = time.perf_counter() - began
    if not plans.best:
        assert plans.stuck is not None
        op = problem.graph.ops[plans.stuck.op].name
        message = f"every pass was stuck; the last at {op}, {format_bytes(plans.stuck.missing_bytes)} short"
        about: dict[str, Any] = {"seconds": seconds, "message": message, "stuck": plans.stuck.op}
        return Solution(Status.NOT_FOUND, problem, budget, METHOD, **about)
    R = _improve(problem, plans, began + time_limit, seed)
    details: dict[str, float] = {"passes": plans.count, "best pass": plans.best[0][0]}
    return replace(certify(problem, budget, R, method=METHOD, details=details), seconds=time.perf_counter() - began)


def _improve(problem: Problem, passes: Passes, deadline: float, seed: int) -> np.ndarray:
    """The best of the best passes after local search, searched once more."""
    cost, stages = passes.best[0]
    R = as_matrix(stages)
    progress.found(problem, passes.budget, R, METHOD, verified=True)
    if cost <= problem.keep_all_cost * (1 + 1e-12):
        return R
    for patience, start in [(4, as_matrix(stages)) for _, stages in passes.best] + [(20, None)]:
        if time.perf_counter() > deadline:
            break
        found = exchange(
            problem,
            passes.tables,
            passes.budget,
            R if start is None else start,
            deadline=deadline,
            seed=seed,
            quiet=patience,
        )
        if (found.sum(axis=0) - R.sum(axis=0)) @ problem.seconds < 0:
            R = found
            progress.found(problem, passes.budget, R, METHOD, verified=True)
    return R


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
        cost = sum(self.tables.seconds[k] for ops in stages for k in ops)
        if all(abs(cost - known) > 1e-9 * known for known, _ in self.best):
            self.best = sorted([*self.best, (cost, stages)], key=lambda plan: plan[0])[:MOST_IMPROVED]
        return stages


def variants(guide: Guide | None) -> Iterator[Weights]:
    """The grid of weights, with the guide where there is one."""
    for weights in GRID:
        yield weights if guide is None else replace(weights, outside=tuple((t, ~kept) for t, kept in guide.kept))
