"""The smallest budget for which a plan is known, and that plan."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import numpy as np

from checkmate.problem import Problem
from checkmate.solution import Status
from checkmate.solvers.certify import peak_of
from checkmate.solvers.eviction import Stuck, Weights, run_pass
from checkmate.solvers.milp import milp
from checkmate.solvers.next_use import GRID, as_matrix
from checkmate.solvers.tables import Tables

FIRST = 2  # weights of the first bisection, which comes close; all of them only refine it
MOST_OPS_EXACT = 24  # up to here the smallest budget is exact
_known: WeakKeyDictionary[Problem, tuple[int, np.ndarray]] = WeakKeyDictionary()


def min_budget(problem: Problem) -> int:
    """The smallest budget in bytes for which a plan was found; `least_runs` has that plan."""
    return least_runs(problem)[0]


def least_runs(problem: Problem, *, time_limit: float = 4.0) -> tuple[int, np.ndarray]:
    """The smallest peak that a plan was found to reach, and its R (T, T). Found once for each problem.

    A bisection between what no schedule avoids and what keeping everything takes, each step a few eviction passes; for
    small graphs then the exact model.
    """
    if problem not in _known:
        deadline = time.perf_counter() + time_limit
        tables = Tables.of(problem)
        least = problem.keep_all_peak, np.eye(len(problem.graph.ops), dtype=bool)
        least = _bisect(problem, tables, *least, list(GRID[:FIRST]), deadline)
        least = _bisect(problem, tables, *least, list(GRID), deadline)
        if len(problem.graph.ops) <= MOST_OPS_EXACT:
            least = _bisect_exactly(problem, *least, deadline)
        _known[problem] = least
    return _known[problem]


def _bisect(
    problem: Problem, tables: Tables, high: int, best: np.ndarray, grid: list[Weights], deadline: float
) -> tuple[int, np.ndarray]:
    """From a known peak to the smallest budget that some pass with these weights fits, within a thousandth."""
    low = middle = int(problem.unavoidable_bytes.max())  # the smallest that could work often does
    while high - low > high // 1000 and time.perf_counter() < deadline:
        stages = _first_fit(tables, middle, grid, deadline)
        if stages is None:
            low = middle + 1
        else:
            best = as_matrix(stages)
            high = peak_of(problem, best)
        middle = (low + high) // 2
    return high, best


def _bisect_exactly(problem: Problem, high: int, best: np.ndarray, deadline: float) -> tuple[int, np.ndarray]:
    """The smallest peak there is, from a known one, while time remains."""
    low = int(problem.unavoidable_bytes.max())
    while low < high and (left := deadline - time.perf_counter()) > 0:
        middle = (low + high) // 2
        found = milp(problem, middle, gap=1.0, time_limit=left)
        if found.schedule is not None and found.peak is not None:
            high, best = found.peak, found.schedule.R
        elif found.status is Status.INFEASIBLE:
            low = middle + 1
        else:
            break
    return high, best


def _first_fit(tables: Tables, budget: int, grid: list[Weights], deadline: float) -> list[list[int]] | None:
    """The first pass that fits; its weights move to the front of the grid."""
    for i, weights in enumerate(grid):
        stages = run_pass(tables, budget, weights)
        if not isinstance(stages, Stuck):
            grid.insert(0, grid.pop(i))
            return stages
        if time.perf_counter() > deadline:
            return None
    return None
