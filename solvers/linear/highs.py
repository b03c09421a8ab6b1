"""Run HiGHS on a `Model`, linear or with integers, and say plainly how it ended.

HiGHS runs in a thread of its own while the caller waits, so that Ctrl-C is noticed at once: Python handles signals
between its own instructions only, and one call of HiGHS may take a minute. HiGHS also keeps one scheduler a thread, and
a run with another number of threads than the scheduler was made for would end at once with 'Not Set'.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import highspy
import numpy as np

from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import Clock
from checkmate.solvers.linear.model import Model, Row

PATIENCE = 0.7  # seconds that HiGHS has to end once Ctrl-C was pressed; after that it is left to end by itself
ROUNDING = 1e-6  # of an objective, by which HiGHS may have summed it up otherwise
COMPLETION = 0.2  # of the time left: to complete a start
SLACK = 1e-6  # of a row: less is none
OVERTIME = 0.04  # of the time limit; a run that takes more, in HiGHS's presolve say, is left to end by itself as well
OnIncumbent = Callable[[np.ndarray], None]
OnBound = Callable[[float], None]


class SolveStatus(Enum):
    """The end of a run."""

    OPTIMAL = "solved to the asked gap"
    STOPPED = "stopped early by a limit; there may be an incumbent"
    INFEASIBLE = "proven to have no solution"


@dataclass(frozen=True)
class Result:
    """The result of HiGHS. ``x`` is None if it has no feasible point; ``bound`` is proven in any case."""

    outcome: SolveStatus
    x: np.ndarray | None  # (columns,)
    objective: float  # of x, infinite without one
    bound: float  # no solution has a smaller objective


class _Silent(highspy.Highs):
    """A solver that prints nothing: HiGHS prints its name at the first call unless an option is set before."""

    # Since 1.16 the constructor calls this first.
    def enableCallbacks(self) -> None:
        _set(self, "output_flag", False)
        super().enableCallbacks()


_MODEL_STATUS = {
    highspy.HighsModelStatus.kOptimal: SolveStatus.OPTIMAL,
    highspy.HighsModelStatus.kModelEmpty: SolveStatus.OPTIMAL,
    highspy.HighsModelStatus.kInfeasible: SolveStatus.INFEASIBLE,
    highspy.HighsModelStatus.kTimeLimit: SolveStatus.STOPPED,
    highspy.HighsModelStatus.kIterationLimit: SolveStatus.STOPPED,
    highspy.HighsModelStatus.kSolutionLimit: SolveStatus.STOPPED,
    highspy.HighsModelStatus.kInterrupt: SolveStatus.STOPPED,
    highspy.HighsModelStatus.kObjectiveTarget: SolveStatus.STOPPED,
    highspy.HighsModelStatus.kObjectiveBound: SolveStatus.STOPPED,
}


def run(
    model: Model,
    *,
    relax: bool = False,
    time_limit: float = float("inf"),
    gap: float = 0.0,
    threads: int = 1,
    start: tuple[np.ndarray, np.ndarray] | None = None,
    target: float | None = None,
    heuristics: bool = True,
    on_incumbent: OnIncumbent | None = None,
    on_bound: OnBound | None = None,
) -> Result:
    """Solve a model.

    Args:
        relax: drop integrality and solve the linear program.
        gap: stop once (objective - bound) / objective is at most this.
        start: columns and their values of a known solution; the rest is completed.
        target: stop at a solution with an objective at most this.
        heuristics: look for solutions beside branch and bound; without, bounds come sooner.
        on_incumbent: called, in another thread, with the (columns,) values of each better solution.
        on_bound: called, in another thread, with each better lower bound of the objective, with integers only.

    Raises:
        SolverError: if HiGHS refuses the model or ends in a state that says nothing about it.
        KeyboardInterrupt: within a second or so of Ctrl-C, also where HiGHS itself takes longer to notice.
    """
    clock = Clock(time_limit)
    options = {"threads": threads, "mip_rel_gap": float(gap), "mip_abs_gap": 0.0 if gap == 0 else 1e-9}
    if target is not None:
        options["objective_target"] = float(target)
    if not heuristics:
        options["mip_heuristic_effort"] = 0.0
    solver = _holding(_to_highs(model, relax), **options)
    x = None if start is None or relax else _completed(model, start, COMPLETION * clock.left, gap, threads)
    if x is not None:
        _check(solver.setSolution(len(x), np.arange(len(x), dtype=np.int32), x), "take the start")
    seconds = clock.left
    _set(solver, "time_limit", seconds)
    going = _Run(solver, on_incumbent, on_bound)
    if not going.wait(seconds + 0.05 + OVERTIME * time_limit):
        # The run did not end in time: what it has reported.
        objective = float(model.cost @ going.x) if going.x is not None else float("inf")
        bound = max(going.bound, least_objective(model))
        return Result(SolveStatus.STOPPED, going.x, objective, min(bound, objective))
    result = _result(solver, model, relax)
    claimed = solver.getInfo().objective_function_value
    if start is None or result.x is None or result.objective - claimed <= ROUNDING * max(1.0, abs(claimed)):
        return result
    # HiGHS 1.16 has found a better one than the start, by its presolve, and gives the start all the same
    calls: dict[str, Any] = {"target": target, "on_incumbent": on_incumbent, "on_bound": on_bound}
    again = run(model, time_limit=clock.left, gap=gap, threads=threads, **calls)
    return replace(result, outcome=SolveStatus.STOPPED) if again.x is None else again


def _completed(
    model: Model, start: tuple[np.ndarray, np.ndarray], time_limit: float, gap: float, threads: int
) -> np.ndarray | None:
    """Complete a partial solution; None if there is no completion, or none was found.

    HiGHS would complete it within its run, and report bounds of the model with these columns fixed as the model's own.
    """
    columns, values = start
    if len(columns) == model.columns:
        return values[np.argsort(columns)].astype(np.float64)
    lp = _to_highs(model, relax=False)
    lower, upper = model.lower.copy(), model.upper.copy()
    lower[columns] = upper[columns] = values
    lp.col_lower_, lp.col_upper_ = lower, upper
    solver = _holding(lp, threads=threads, mip_rel_gap=float(gap), time_limit=time_limit)
    going = _Run(solver, None, None)
    return _result(solver, model, relax=False).x if going.wait((1 + OVERTIME) * time_limit + 0.05) else going.x


class _Run:
    """A run of HiGHS in a separate thread, so that the caller can leave it, and Ctrl-C reaches both."""

    def __init__(self, solver: highspy.Highs, on_incumbent: OnIncumbent | None, on_bound: OnBound | None) -> None:
        self._solver, self._on_incumbent, self._on_bound = solver, on_incumbent, on_bound
        self.x: np.ndarray | None = None  # the best solution that was reported
        self.bound = -float("inf")  # the best bound that was reported
        self._stop = False
        self._over = threading.Event()
        self._status = highspy.HighsStatus.kError
        self._error: BaseException | None = None
        for asks in (solver.cbSimplexInterrupt, solver.cbIpmInterrupt, solver.cbMipInterrupt):
            asks.subscribe(self._answer)
        solver.cbMipImprovingSolution.subscribe(self._improve)
        # no daemon: a thread that Python ends by force inside HiGHS takes the whole process down
        self._thread = threading.Thread(target=self._run, name="checkmate-highs")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the run; tell whether it ended in time. Exceptions from callbacks are raised here."""
        clock = Clock(seconds)
        try:
            while (left := clock.left) > 0 and not self._over.wait(min(0.1, left)) and self._error is None:
                pass  # in turns, for on Windows a long wait hears no Ctrl-C
            over = self._over.is_set()
        except BaseException:
            self._stop = True
            self._over.wait(PATIENCE)
            raise
        if self._error is not None:
            self._over.wait(PATIENCE)
            raise self._error
        if over:
            self._thread.join()
            for asks in (self._solver.cbSimplexInterrupt, self._solver.cbIpmInterrupt, self._solver.cbMipInterrupt):
                asks.unsubscribe(self._answer)
            _check(self._status, "run")
        self._stop = not over
        return over

    def _run(self) -> None:
        try:
            self._status = self._solver.run()
        except BaseException as error:  # noqa: BLE001  # raised again by `wait`
            self._error = SolverError(f"HiGHS failed: {error}")
            self._error.__cause__ = error
        finally:
            self._over.set()

    def _answer(self, event: highspy.HighsCallbackEvent) -> None:
        """Answer HiGHS's question whether to stop. Errors are kept for later: none may pass through its code."""
        bound = float(event.data_out.mip_dual_bound)
        if np.isfinite(bound) and bound > self.bound and not self._stop:
            self.bound = bound
            self._keep_error(self._on_bound, bound)
        if self._stop:
            event.interrupt()

    def _improve(self, event: highspy.HighsCallbackEvent) -> None:
        if not self._stop:
            self.x = np.array(event.data_out.mip_solution)
            self._keep_error(self._on_incumbent, self.x)

    def _keep_error(self, call: Callable[[Any], None] | None, value: Any) -> None:
        try:
            if call is not None:
                call(value)
        except BaseException as error:  # noqa: BLE001  # Ctrl-C too: raised again by `wait`
            self._error, self._stop = error, True


class Relaxation:
    """The linear relaxation of a model, to which rows are added: each run begins where the one before ended.

    >>> model = Model()
    >>> x = model.variables((2,), cost=[-1.0, -1.0])
    >>> relaxation = Relaxation(model)
    >>> relaxation.solve().bound
    -2.0
    >>> relaxation.add([Row(x, np.array([2.0, 1.0]), 2.0)])
    >>> relaxation.solve().bound, relaxation.rows
    (-1.5, 1)
    """

    def __init__(self, model: Model, threads: int = 1) -> None:
        self._model, self._rows = model, list[Row]()
        self._solver = _holding(_to_highs(model, relax=True), threads=threads)
        self._slack = np.zeros(0)  # of the added rows, in the last answer

    @property
    def rows(self) -> int:
        """How many rows were added and not dropped."""
        return len(self._rows)

    def solve(self, time_limit: float = float("inf")) -> Result:
        """Solve it.

        Raises:
            SolverError: if HiGHS ends in a state that says nothing about it.
        """
        if np.isfinite(time_limit):  # HiGHS counts all runs
            _set(self._solver, "time_limit", self._solver.getRunTime() + time_limit)
        run = _Run(self._solver, None, None)
        if not run.wait(time_limit + 0.05 + OVERTIME * time_limit):
            return Result(SolveStatus.STOPPED, None, float("inf"), least_objective(self._model))
        result = _result(self._solver, self._model, relax=True)
        if result.x is not None:
            upper = np.array([row.upper for row in self._rows])
            self._slack = upper - np.array(self._solver.getSolution().row_value)[self._model.rows :]
        return result

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows."""
        if not rows:
            return
        starts = np.cumsum([0, *(len(row.columns) for row in rows)])
        columns = np.concatenate([row.columns for row in rows]).astype(np.int32)
        coefficients = np.concatenate([row.coefficients for row in rows]).astype(np.float64)
        lower, upper = np.full(len(rows), -highspy.kHighsInf), np.array([row.upper for row in rows], dtype=np.float64)
        status = self._solver.addRows(
            len(rows), lower, upper, len(columns), starts[:-1].astype(np.int32), columns, coefficients
        )
        _check(status, "add rows")
        self._rows += rows

    def binding(self) -> list[Row]:
        """The added rows without slack in the last answer."""
        return [row for row, slack in zip(self._rows, self._slack, strict=False) if slack <= SLACK]

    def drop_slack(self) -> None:
        """Drop the added rows with slack in the last answer."""
        slack = self._slack > SLACK
        rows = np.flatnonzero(slack).astype(np.int32) + self._model.rows
        _check(self._solver.deleteRows(len(rows), rows.astype(np.int32)), "drop rows")
        self._rows = [row for row, drop in zip(self._rows, slack.tolist(), strict=True) if not drop]


def export(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model as ``.lp`` or ``.mps``, by the file's suffix, with the names of its variables and rows.

    Raises:
        ValueError: if the name ends otherwise.
        OSError: if the file cannot be written.
    """
    if Path(path).suffix not in (".lp", ".mps"):
        raise ValueError(f"A model is written as .lp or .mps, not as {Path(path).name!r}.")
    Path(path).touch()  # HiGHS does not say why it cannot write
    lp = _to_highs(model, relax=False)
    lp.col_names_, lp.row_names_ = model.column_names(), model.row_names()
    _check(_holding(lp).writeModel(str(path)), f"write {path}")


def _result(solver: highspy.Highs, model: Model, relax: bool) -> Result:
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kUnboundedOrInfeasible and np.isfinite(least_objective(model)):
        status = highspy.HighsModelStatus.kInfeasible  # nothing that is bounded is unbounded
    if status not in _MODEL_STATUS:
        raise SolverError(f"HiGHS ended with status {solver.modelStatusToString(status)!r}, which solves nothing.")
    outcome = _MODEL_STATUS[status]
    info = solver.getInfo()
    has_point = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    x = np.array(solver.getSolution().col_value) if has_point and outcome is not SolveStatus.INFEASIBLE else None
    objective = float(model.cost @ x) if x is not None else float("inf")
    if outcome is SolveStatus.INFEASIBLE:
        bound = float("inf")
    elif relax or not model.integer.any():
        bound = objective if outcome is SolveStatus.OPTIMAL else least_objective(model)
    else:
        bound = max(float(info.mip_dual_bound), least_objective(model))
    return Result(outcome, x, objective, min(bound, objective))


def least_objective(model: Model) -> float:
    """The objective with each variable at its cheaper bound."""
    cost = model.cost
    at = np.where(cost > 0, model.lower, model.upper)
    return float(cost[cost != 0] @ at[cost != 0])


def _to_highs(model: Model, relax: bool) -> highspy.HighsLp:
    matrix = model.matrix()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = model.columns, model.rows
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = model.cost, model.lower, model.upper
    lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    if not relax and model.integer.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[bool(i)] for i in model.integer]
    return lp


def _holding(lp: highspy.HighsLp, **options: bool | int | float | str) -> highspy.Highs:
    solver = _Silent()
    for option, value in options.items():
        _set(solver, option, value)
    _check(solver.passModel(lp), "take the model")
    return solver


def _set(solver: highspy.Highs, option: str, value: bool | int | float | str) -> None:
    _check(solver.setOptionValue(option, value), f"set {option} to {value!r}")


def _check(status: highspy.HighsStatus, doing: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise SolverError(f"HiGHS failed to {doing}.")
