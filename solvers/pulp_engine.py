"""The same model, solved by whatever solver PuLP knows: CBC, which it brings along, Gurobi, CPLEX, SCIP, Xpress, ..."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pulp

from checkmate.errors import SolverError
from checkmate.solvers import highs
from checkmate.solvers.highs import Outcome, Result
from checkmate.solvers.model import Model


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
    """Solve a model with a solver that PuLP knows by this name, e.g. "CBC", "GUROBI" or "SCIP".

    PuLP passes no bound on, so there is one only where the solver says that it reached the asked gap, by its own
    tolerances. ``start`` and ``target``, as in `highs.run`, are not passed on either.

    Raises:
        SolverError: if PuLP does not know the solver, does not find it on this computer, or it fails.
    """
    began = time.perf_counter()
    solver = _solver(name, time_limit, gap, threads)
    problem, variables = _to_pulp(model)
    try:
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"{name} failed: {error}") from error
    seconds = time.perf_counter() - began
    if problem.status == pulp.LpStatusInfeasible:
        return Result(Outcome.INFEASIBLE, None, float("inf"), float("inf"), seconds)
    x = np.array([variables[column].varValue or 0.0 for column in model.column_names()])
    x[model.integer] = x[model.integer].round()
    solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    if not solved or model.broken(x, tolerance=1e-5):  # some leave the relaxation's values when time is up
        return Result(Outcome.STOPPED, None, float("inf"), highs.least_objective(model), seconds)
    objective = float(model.cost @ x)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible:
        return Result(Outcome.STOPPED, x, objective, highs.least_objective(model), seconds)
    return Result(Outcome.OPTIMAL, x, objective, objective - gap * abs(objective), seconds)


def _to_pulp(model: Model) -> tuple[pulp.LpProblem, dict[str, pulp.LpVariable]]:
    """The problem and its variables by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.mps"
        highs.export(model, path)
        variables, problem = pulp.LpProblem.fromMPS(str(path), sense=pulp.LpMinimize)
    return problem, variables


def _solver(name: str, time_limit: float, gap: float, threads: int) -> pulp.LpSolver:
    """PuLP's interface to a solver: of those with this name the first that is there."""
    known = pulp.listSolvers()
    there = pulp.listSolvers(onlyAvailable=True)
    names = ("COIN_CMD", "PULP_CBC_CMD") if name == "CBC" else (name, f"{name}_CMD", f"{name}_PY")
    candidates = [n for n in names if n in known]
    for candidate in candidates:
        if candidate in there:
            limit = time_limit if np.isfinite(time_limit) else None
            return pulp.getSolver(candidate, msg=False, timeLimit=limit, gapRel=gap, threads=threads)
    problem = "is not on this computer" if candidates else "is no solver that PuLP knows"
    raise SolverError(f"{name!r} {problem}. Here are: {', '.join(there)}.")
