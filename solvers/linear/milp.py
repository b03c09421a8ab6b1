"""Solve the exact model of `checkmate.solvers.linear.equations`: with HiGHS.

On the main path, 11 of 16: see docs/idea.md.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import obeys_limits, peak_of
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import Variables, build, cost_unit, without_spare
from checkmate.solvers.linear.highs import SolveStatus
from checkmate.solvers.linear.model import NONE, Model
from checkmate.units import exact_bytes

ATTEMPTS = 4  # at a schedule that breaks the budget by less than the solver's tolerance


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The relaxed model's answer: how much of each op runs and of each value stays, and the bound that it proves."""

    outcome: SolveStatus
    R: np.ndarray | None  # (T, T) in [0, 1]; None where nothing was found
    S: np.ndarray | None  # (T, V) in [0, 1], results included
    bound: float  # seconds that every schedule within the budget takes; infinite if proven that none is


def milp(
    task: Task,
    incumbent: Incumbent,
    *,
    formulation: str = "strengthened",
    start: Schedule | None = None,
    target: float | None = None,
) -> Remarks:
    """The cheapest schedule within a budget, proven or with a bound; no second memory.

    Its options are those of `checkmate.solvers.host.exact.milp`, which asks this where there is none.

    Raises:
        ValueError: if the formulation is unknown.
        SolverError: if the solver fails, or its answer does not pass the verifier.

    >>> from checkmate import solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> [solve(problem, budget, method="milp").status for budget in (3, 2)]
    [Status.OPTIMAL, Status.INFEASIBLE]
    """
    problem, budget, unit = task.problem, task.budget, cost_unit(task.problem)
    method = "milp" if formulation == "strengthened" else f"milp ({formulation})"
    # A budget below what is at hand in any schedule needs no model.
    if (needed := problem.unavoidable_bytes).max() > budget:
        incumbent.prove(float("inf"))
        worst = problem.graph.ops[int(needed.argmax())].name
        most = exact_bytes(budget)
        message = f"at least {exact_bytes(needed.max())} are at hand while {worst} runs, and the budget is {most}"
        return Remarks(message, method=method)
    # Solve; again with a smaller budget where the answer is over it by the tolerance of the solver.
    if start is not None and obeys_limits(problem, start.R):
        incumbent.offer(start.R, "start")
    known, margin = incumbent.R, 0

    def report(model: Model, x: Variables, values: np.ndarray) -> None:
        with contextlib.suppress(SolverError):  # the answer at the end decides whether the solver is right
            incumbent.offer(model.value(values, x.R).round().astype(bool), "milp")

    for _ in range(ATTEMPTS):
        model, x = build(*without_spare(problem, budget - margin), formulation=formulation)
        there = x.R != NONE  # runs without a variable are of no use
        result = highs.run(
            model,
            time_limit=task.clock.left,
            gap=task.gap,
            threads=task.threads,
            start=None if known is None else (x.R[there], known[there]),
            target=None if target is None else target / unit,
            on_incumbent=partial(report, model, x),
            on_bound=None if margin else lambda bound: incumbent.prove(bound * unit),
        )
        if not margin:  # only the model of the whole budget proves anything
            incumbent.prove(result.bound * unit)
        if result.x is None:
            break
        found = model.value(result.x, x.R).round().astype(bool)
        incumbent.offer(found, "milp")
        if (excess := peak_of(problem, found) - budget) <= 0:
            break
        margin += 2 * excess  # within the solver's tolerance, but not within the budget
    figures = {"columns": model.columns, "rows": model.rows, "formulation": formulation}
    return Remarks(details=figures, method=method)


def relax(
    problem: Problem, budget: int, *, formulation: str = "strengthened", time_limit: float = 60.0, threads: int = 1
) -> Relaxation:
    """The linear relaxation of the model: a lower bound on the cost, and R and S between zero and one.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> relax(problem, budget=3).bound
    4.0
    """
    if problem.unavoidable_bytes.max() > budget:
        return Relaxation(SolveStatus.INFEASIBLE, None, None, float("inf"))
    model, x = build(*without_spare(problem, budget), formulation=formulation)
    result = highs.run(model, relax=True, time_limit=time_limit, threads=threads)
    bound = result.bound * cost_unit(problem)
    if result.x is None:
        return Relaxation(result.outcome, None, None, bound)
    S = model.value(result.x, x.S)
    for v in problem.graph.outputs:
        producer = problem.graph.values[v].producer
        if producer is not None:
            S[producer + 1 :, v] = 1.0
    return Relaxation(result.outcome, model.value(result.x, x.R), S, bound)


def export(problem: Problem, budget: int, path: str | os.PathLike[str], *, formulation: str = "strengthened") -> None:
    """Write the model as a file for another solver: ``.lp`` or ``.mps``, by the suffix.

    Raises:
        ValueError: if the name ends otherwise, or the formulation is unknown.
        OSError: if the file cannot be written.
    """
    highs.export(build(problem, budget, formulation=formulation)[0], path)
