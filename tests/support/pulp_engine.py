"""Solve a `Model` with a solver that PuLP knows, such as CBC, which comes with it: HiGHS is held against it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pulp

from checkmate.errors import SolverError
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.highs import Result, SolveStatus
from checkmate.solvers.linear.model import Model

_UNSOLVED = {"varValue": None, "dj": None}


def run(
    model: Model,
    name: str,
    *,
    time_limit: float = float("inf"),
    gap: float = 0.0,
    threads: int = 1,
    start: tuple[np.ndarray, np.ndarray] | None = None,
    target: float | None = None,
) -> Result:
    """Solve a model with the solver that PuLP knows by this name, such as "CBC", "GUROBI" or "SCIP".

    PuLP passes no bound on, so there is one only where the solver says, before its time is up, that it reached the
    asked gap by its own tolerances, or that there is no solution. What it claims later proves nothing: CBC, stopped in
    its preprocessing, calls a model that it has not finished with "Integer infeasible". ``start`` and ``target``, as in
    `highs.run`, are not passed on either. HiGHS by PuLP writes its name to stdout since 1.16.

    Raises:
        SolverError: if PuLP does not know the solver, does not find it on this computer, or it fails.
    """
    solver = _solver(name, time_limit, gap, threads)
    variables, problem = pulp.LpProblem.fromDict(_as_dict(model))
    asked = time.monotonic()  # on the wall: the solver is another process
    try:
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"{name} failed: {error}") from error
    proven = time.monotonic() - asked < time_limit  # its own clock shows no more: it began later and ended earlier
    if problem.status == pulp.LpStatusInfeasible and proven:
        return Result(SolveStatus.INFEASIBLE, None, float("inf"), float("inf"))
    x = np.array([variables[column].varValue or 0.0 for column in model.column_names()])
    x[model.integer] = x[model.integer].round()
    solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if not solved or broken(model, x, tolerance=1e-5):  # some leave the relaxation's values when time is up
        return Result(SolveStatus.STOPPED, None, float("inf"), highs.least_objective(model))
    objective = float(model.cost @ x)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible or not proven:
        return Result(SolveStatus.STOPPED, x, objective, highs.least_objective(model))
    return Result(SolveStatus.OPTIMAL, x, objective, objective - gap * abs(objective))


def broken(model: Model, x: np.ndarray, tolerance: float = 1e-6) -> list[str]:
    """The constraints that ``x`` breaks: family, row within it, and amount."""
    activity = model.matrix() @ x
    excess = np.maximum(model.row_lower - activity, activity - model.row_upper)
    return [
        f"{name}[{row}] by {excess[rows][row]:g}"
        for name, rows in model.families.items()
        for row in np.flatnonzero(excess[rows] > tolerance)
    ]


def _as_dict(model: Model) -> dict[str, Any]:
    """The model in PuLP's exchange format."""
    names = model.column_names()
    finite = [(np.isfinite(b), b) for b in (model.lower, model.upper)]
    lower, upper = ([float(x) if ok else None for ok, x in zip(*bounds, strict=True)] for bounds in finite)
    variables = [
        {"name": n, "lowBound": a, "upBound": b, "cat": pulp.LpInteger if i else pulp.LpContinuous, **_UNSOLVED}
        for n, a, b, i in zip(names, lower, upper, model.integer, strict=True)
    ]
    costs = [{"name": names[j], "value": float(model.cost[j])} for j in np.flatnonzero(model.cost)]
    # The rows; one that lies between two numbers as two.
    matrix, rows = model.matrix().tocsr(), []
    for i, name in enumerate(model.row_names()):
        entries = slice(matrix.indptr[i], matrix.indptr[i + 1])
        terms = zip(matrix.indices[entries], matrix.data[entries], strict=True)
        coefficients = [{"name": names[j], "value": float(a)} for j, a in terms]
        low, high = float(model.row_lower[i]), float(model.row_upper[i])
        for sense, bound, side in [(0, low, "")] if low == high else [(1, low, "_low"), (-1, high, "_high")]:
            if np.isfinite(bound):
                row = {"sense": sense, "constant": -bound, "name": name + side, "pi": None}
                rows.append({**row, "coefficients": coefficients})
    return {
        "parameters": {"name": "checkmate", "sense": pulp.LpMinimize, "status": 0, "sol_status": 0},
        "objective": {"name": "cost", "coefficients": costs},
        "constraints": rows,
        "variables": variables,
        "sos1": [],
        "sos2": [],
    }


def _solver(name: str, time_limit: float, gap: float, threads: int) -> pulp.LpSolver:
    """PuLP's interface to a solver: the first available one with this name."""
    known, there = pulp.listSolvers(), pulp.listSolvers(onlyAvailable=True)
    names = ("COIN_CMD", "PULP_CBC_CMD") if name == "CBC" else (name, f"{name}_CMD", f"{name}_PY")
    candidates = [n for n in names if n in known]
    for candidate in candidates:
        if candidate in there:
            limit = time_limit if np.isfinite(time_limit) else None
            return pulp.getSolver(candidate, msg=False, timeLimit=limit, gapRel=gap, threads=threads)
    problem = "is not on this computer" if candidates else "is no solver that PuLP knows"
    raise SolverError(f"{name!r} {problem}. Here are: {', '.join(there)}.")
