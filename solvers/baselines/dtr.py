"""A plan of what the runtime of dynamic tensor rematerialization (Kirisame et al., ICLR 2021) would run.

The runtime (`dtr_runtime`) is simulated under a budget; ops that it runs between the first executions of two ops in
turn belong to the later one's stage. We differ from the paper in what a static plan allows and asks for: a stage runs
each op once, in the order of the graph; runs that nobody uses are left out; memory is freed by liveness. So the plan
takes less memory than the runtime saw, or more, and the budget that the runtime is told is searched for, until the
simulated peak of the plan fits ours.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.baselines.dtr_runtime import Runtime
from checkmate.solvers.baselines.dtr_scores import HEURISTICS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import as_matrix, cost_of, without_forbidden, without_useless
from checkmate.solvers.common.task import OutOfTime, Task
from checkmate.solvers.search.eviction import Stuck
from checkmate.units import format_bytes

METHOD = "dtr"
TRIES = 5  # budgets that the runtime is told, for each heuristic


def dtr(
    task: Task, incumbent: Incumbent, *, heuristic: str | None = None, ignore_small: bool = False, sample: bool = False
) -> Remarks:
    """What dynamic tensor rematerialization would run, as a plan. No plan where no run fits.

    Args:
        heuristic: one of `checkmate.solvers.baselines.dtr_scores.HEURISTICS`; None tries them all, for as much time
            each, and the cheapest plan counts. ``details`` says which it was, and what each of them cost.
        ignore_small: evict no value smaller than a hundredth of the mean, unless there is nothing else.
        sample: look at √n of the n values that could go, drawn at random.

    Raises:
        ValueError: if there is no such heuristic.

    >>> from checkmate import solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, 3, method="dtr", heuristic="h_eq").cost
    4.0
    """
    if heuristic is not None and heuristic not in HEURISTICS:
        raise ValueError(f"There is no heuristic {heuristic!r}. They are {', '.join(HEURISTICS)}.")
    names = tuple(HEURISTICS) if heuristic is None else (heuristic,)
    tried = []
    for i, name in enumerate(names):
        rng = np.random.default_rng(task.seed) if sample else None
        within = replace(task.clock, limit=task.clock.limit * (i + 1) / len(names))
        tried.append(_try(replace(task, clock=within), incumbent, name, ignore_small, rng))
    best = min(tried, key=lambda one: one.cost)
    if incumbent.R is None:
        return _explain(task.problem, incumbent, tried)
    costs = {one.name: one.cost for one in tried}
    return Remarks(details={"heuristic": best.name, "costs": costs, "told": best.told})


@dataclass
class Tried:
    """What came of one heuristic, over the budgets that its runtime was told."""

    name: str
    cost: float = float("inf")  # seconds, of its cheapest plan that fits
    told: int = 0  # bytes, for that plan
    stuck: Stuck | None = None
    out_of_time: bool = False


def _try(task: Task, incumbent: Incumbent, name: str, ignore_small: bool, rng: np.random.Generator | None) -> Tried:
    """Tell the runtime the budget, and then by bisection more or less, as its plan fits or not.

    Where everything can be kept the runtime is told that there is no pressure: it may hold what a pinned op made
    beyond its last use, and would evict to make room for that.
    """
    problem, tables, tried = task.problem, Tables.of(task.problem), Tried(name)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    told = task.budget if task.budget < high else problem.resident + int(problem.sizes.sum()) + high
    for _ in range(TRIES):
        runtime = Runtime(tables, told, HEURISTICS[name], clock=task.clock, ignore_small=ignore_small, rng=rng)
        fits = True
        try:
            stages = runtime.run()
        except OutOfTime:
            tried.out_of_time = True
            break
        if isinstance(stages, Stuck):
            tried.stuck = stages
        else:
            R = without_useless(problem.graph, without_forbidden(problem, as_matrix(stages)))
            fits = incumbent.fits(R)
            if fits and (cost := cost_of(problem, R)) < tried.cost:
                tried.cost, tried.told = cost, told
            if fits:
                incumbent.offer(R, METHOD)
        low, high = (told + 1, high) if fits else (low, told - 1)
        if low > high:
            break
        told = (low + high) // 2
    return tried


def _explain(problem: Problem, incumbent: Incumbent, tried: list[Tried]) -> Remarks:
    """Why there is no plan, and the op in the way where one is known."""
    stuck = next((one.stuck for one in reversed(tried) if one.stuck is not None), None)
    reasons = []
    if stuck is not None:
        op = problem.graph.ops[stuck.op].name
        reasons.append(f"nothing was left to evict at {op}, {format_bytes(stuck.missing_bytes)} short")
    if incumbent.least_peak is not None:
        reasons.append(f"the plan of least peak takes {format_bytes(incumbent.least_peak)}")
    if any(one.out_of_time for one in tried):
        reasons.append("a run passed the time limit or went round in circles")
    return Remarks("; ".join(reasons), stuck=None if stuck is None else stuck.op)
