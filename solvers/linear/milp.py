"""Solve the exact model of `checkmate.solvers.linear.equations`: with HiGHS, or any solver that PuLP knows."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.solvers.common import incumbent as progress
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.runs import cost_of, peak_of
from checkmate.solvers.linear import highs, pulp_engine
from checkmate.solvers.linear.equations import Variables, build, cost_unit
from checkmate.solvers.linear.highs import Outcome, Result
from checkmate.solvers.linear.model import NONE, Model
from checkmate.units import exact_bytes

ATTEMPTS = 4  # at a schedule that breaks the budget by less than the solver's tolerance


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The model without integrality: how much of each op runs and of each value stays, and what that proves."""

    outcome: Outcome
    R: np.ndarray | None  # (T, T) in [0, 1]; None where nothing was found
    S: np.ndarray | None  # (T, V) in [0, 1], results included
    bound: float  # seconds that every schedule within the budget takes; infinite if proven that none is
    seconds: float  # spent solving


def milp(
    problem: Problem,
    budget: int,
    *,
    formulation: str = "strengthened",
    time_limit: float = 60.0,
    gap: float = 0.0,
    threads: int = 1,
    start: Schedule | None = None,
    target: float | None = None,
    engine: str = "highs",
) -> Solution:
    """The cheapest schedule within a budget, proven or with a bound.

    Args:
        problem: what to schedule.
        budget: bytes.
        formulation: "strengthened", or "paper" for comparison.
        time_limit: seconds.
        gap: stop once (cost - bound) / cost is at most this.
        threads: of the solver.
        start: a known schedule to start from; the answer is never worse. Ignored where it does not fit the budget.
        target: stop at a schedule that takes at most this many seconds.
        engine: "highs", or "pulp:" and the name of a solver that PuLP knows, e.g. "pulp:CBC".

    Raises:
        ValueError: if the formulation is unknown.
        SolverError: if the solver fails, or its answer does not pass the verifier.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> milp(problem, budget=3).cost, milp(problem, budget=2).status
    (4.0, Status.INFEASIBLE)
    """
    began = time.perf_counter()
    method = "milp" if formulation == "strengthened" else f"milp ({formulation})"
    if (needed := problem.unavoidable_bytes).max() > budget:
        worst = problem.graph.ops[int(needed.argmax())].name
        most = exact_bytes(budget)
        message = f"at least {exact_bytes(needed.max())} are at hand while {worst} runs, and the budget is {most}"
        return Solution(Status.INFEASIBLE, problem, budget, method, bound=float("inf"), message=message)
    incumbent = start.R if start is not None and _excess(problem, budget, start.R) <= 0 else None
    bound, margin = 0.0, 0
    for _ in range(ATTEMPTS):
        model, x = build(problem, budget - margin, formulation=formulation)
        left = max(0.0, time_limit - (time.perf_counter() - began))
        goal = None if target is None else target / cost_unit(problem)
        known = _columns(x, incumbent)
        result = _run(
            model,
            engine,
            time_limit=left,
            gap=gap,
            threads=threads,
            start=known,
            target=goal,
            **(_reports(problem, budget, model, x, margin) if engine == "highs" else {}),
        )
        if not margin:  # only the model of the whole budget proves anything
            bound, outcome = result.bound * cost_unit(problem), result.outcome
        found = None if result.x is None else model.value(result.x, x.R).round().astype(bool)
        excess = 0 if found is None else _excess(problem, budget, found)
        if excess <= 0:
            break
        margin += 2 * excess  # within the solver's tolerance, but not within the budget
    else:
        found = None
    seconds = time.perf_counter() - began
    details = {"columns": model.columns, "rows": model.rows, "formulation": formulation, "engine": engine}
    schedules = [R for R in (incumbent, found) if R is not None]
    best = min(schedules, key=lambda R: cost_of(problem, R), default=None)
    if best is not None:
        return certify(problem, budget, best, method=method, bound=bound, seconds=seconds, details=details)
    status = Status.INFEASIBLE if outcome is Outcome.INFEASIBLE else Status.NOT_FOUND
    return Solution(status, problem, budget, method, bound=bound, seconds=seconds, details=details)


def relax(
    problem: Problem, budget: int, *, formulation: str = "strengthened", time_limit: float = 60.0, threads: int = 1
) -> Relaxation:
    """The linear relaxation of the model: a lower bound on the cost, and R and S between zero and one.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> relax(problem, budget=3).bound
    4.0
    """
    if problem.unavoidable_bytes.max() > budget:
        return Relaxation(Outcome.INFEASIBLE, None, None, float("inf"), 0.0)
    model, x = build(problem, budget, formulation=formulation)
    result = highs.run(model, relax=True, time_limit=time_limit, threads=threads)
    bound = result.bound * cost_unit(problem)
    if result.x is None:
        return Relaxation(result.outcome, None, None, bound, result.seconds)
    S = model.value(result.x, x.S)
    for v in problem.graph.outputs:
        producer = problem.graph.values[v].producer
        if producer is not None:
            S[producer + 1 :, v] = 1.0
    return Relaxation(result.outcome, model.value(result.x, x.R), S, bound, result.seconds)


def export(problem: Problem, budget: int, path: str | os.PathLike[str], *, formulation: str = "strengthened") -> None:
    """Write the model as a file for another solver: ``.lp`` or ``.mps``, by the name.

    Raises:
        ValueError: if the name ends otherwise, or the formulation is unknown.
        OSError: if the file cannot be written.
    """
    highs.export(build(problem, budget, formulation=formulation)[0], path)


def _run(model: Model, engine: str, **options: Any) -> Result:
    if engine == "highs":
        return highs.run(model, **options)
    if engine.startswith("pulp:"):
        return pulp_engine.run(model, engine.removeprefix("pulp:"), **options)
    raise ValueError(f"Unknown engine {engine!r}: it is 'highs', or 'pulp:' and a solver's name, e.g. 'pulp:CBC'.")


def _reports(problem: Problem, budget: int, model: Model, x: Variables, margin: int) -> dict[str, Any]:
    """What HiGHS calls as it goes; its bound holds for the model of the whole budget only."""

    def on_incumbent(values: np.ndarray) -> None:
        progress.found(problem, budget, model.value(values, x.R).round().astype(bool), "milp")

    def on_bound(bound: float) -> None:
        progress.proved(problem, budget - margin, bound * cost_unit(problem))

    return {"on_incumbent": on_incumbent, "on_bound": on_bound}


def _columns(x: Variables, R: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    """A schedule as columns and values; the solver finds the rest. Runs without a variable are of no use."""
    there = x.R != NONE
    return None if R is None else (x.R[there], R[there])


def _excess(problem: Problem, budget: int, R: np.ndarray) -> int:
    """Bytes by which a schedule exceeds the budget; none for what is no schedule, so that `certify` refuses it."""
    return peak_of(problem, R) - budget if R.diagonal().all() else 0
