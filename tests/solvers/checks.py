"""Checks that tests of several solvers share, and schedules to begin with."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from checkmate import Plan, Problem, Schedule, Solution, Status
from checkmate.core import simulator
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import Clock, Incumbent, Task


def check(solution: Solution) -> None:
    """The plan verifies and the figures belong to it."""
    assert simulator.check_plan(solution.plan, solution.problem, solution.budget) == []
    assert solution.cost == pytest.approx(simulator.cost(solution.plan, solution.problem))
    assert solution.peak == simulator.simulate(solution.plan, solution.problem).peak <= solution.budget
    assert solution.bound <= solution.cost
    assert solution.seconds > 0


def by(method: str) -> Callable[..., Solution]:
    """Solve by a method itself: options are not checked, and a refusal names no way out."""

    def solve(
        problem: Problem, budget: int, *, time_limit: float = 60.0, gap: float = 0.0, seed: int = 0, **options: object
    ) -> Solution:
        incumbent = Incumbent(Task(problem, budget, Clock(time_limit), gap, seed=seed))
        return incumbent.solution(method, METHODS[method].run(incumbent.task, incumbent, **options))

    return solve


def solve(method: str, problem: Problem, budget: int, **options: object) -> Solution:
    """Solve by a method itself; a plan is verified, and that there is none is explained."""
    solution = by(method)(problem, budget, **options)
    assert solution.method.partition(" (")[0] == method
    if solution.plan is not None:
        check(solution)
    else:
        assert solution.status in (Status.NOT_FOUND, Status.INFEASIBLE)
        assert solution.message
    return solution


def begun(problem: Problem, budget: int, seconds: float = math.inf, **options: float) -> Incumbent:
    """A solve in which nothing is known; its task is ``begun(...).task``."""
    return Incumbent(Task(problem, budget, Clock(seconds), **options))


def wrong(problem: Problem, found: Plan | np.ndarray | list[list[int]], budget: int | None = None) -> list[str]:
    """Faults that the verifier finds in a plan, in that of a schedule's R, or in that of the runs of each stage."""
    if isinstance(found, np.ndarray):
        found = simulator.lower(problem, Schedule.from_runs(problem.graph, found))
    elif isinstance(found, list):
        found = simulator.lower_runs(problem, found)
    return simulator.check_plan(found, problem, budget)


def runs(problem: Problem, *again: tuple[int, int]) -> np.ndarray:
    """R of a schedule that runs each op once, and some again: (stage, op)."""
    R = np.eye(len(problem.graph.ops), dtype=bool)
    for place in again:
        R[place] = True
    return R


def all_runs(problem: Problem) -> np.ndarray:
    return np.tril(np.ones_like(runs(problem)))


def subsets(of: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(of, n) for n in range(len(of) + 1))


@contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    began = time.perf_counter()
    yield
    assert time.perf_counter() - began < seconds
