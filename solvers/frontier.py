"""Cost against peak: one problem solved for many budgets, by one or several methods.

Each pair of a method and a budget is solved by itself, in parallel. What one finds then serves the others: a plan for
a budget is one for every larger budget, so that a method's cost never rises with the budget; a bound, proven for a
budget by whichever method, holds for every smaller one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from checkmate.core.answer import Column, Listed, Table, record, table
from checkmate.core.problem import Problem
from checkmate.core.rules import Rules, with_rules
from checkmate.core.solution import Solution, Status, check_problem, format_gap
from checkmate.errors import CheckmateError
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import again, contradicts
from checkmate.solvers.common.processes import Processes
from checkmate.solvers.solve import check_limits, check_method, min_budget, refuse_unknown_rules, solve
from checkmate.statusline import showing
from checkmate.units import format_bytes, format_seconds, parse_bytes

BUDGETS = 8  # where none are given
log = logging.getLogger("checkmate.solve")


@dataclass(frozen=True)
class Row:
    """The result of one method at one budget."""

    method: str
    budget: int  # bytes
    status: Status
    cost: float  # seconds of the step, infinite without a plan
    overhead: float  # the cost relative to running each op once, minus one
    bound: float  # seconds that every schedule within the budget takes, proven in this row or another
    gap: float  # (cost - bound) / cost, infinite without a plan
    peak: int | None  # bytes
    seconds: float  # spent solving
    from_budget: int | None  # the smaller budget that this plan was found for; None: for this one
    message: str
    solution: Solution = field(repr=False, compare=False)

    @classmethod
    def of(cls, method: str, solution: Solution, from_budget: int | None = None) -> Row:
        """The row of a solution."""
        s = solution
        figures = (s.budget, s.status, s.cost, s.overhead, s.bound, s.gap, s.peak, s.seconds)
        return cls(method, *figures, from_budget, s.message, s)


@dataclass(frozen=True, repr=False)
class Frontier(Listed[Row]):
    """The rows: by method in the order asked for, then by budget, ascending. Prints as a table."""

    rows: tuple[Row, ...]

    def records(self) -> list[dict[str, Any]]:
        """The rows as dicts of numbers and text, the status as its label; solutions are left out."""
        return [{**record(row), "status": row.status.label} for row in self.rows]

    def _tables(self) -> Iterator[Table]:
        yield table((*FIGURES, Column("status", _status)), self.rows)


FIGURES = (  # the columns of a table of rows that hold no text but the method
    Column("method", "method"),
    Column("budget", "budget", format_bytes),
    Column("peak", "peak", format_bytes),
    Column("step", "cost", format_seconds),
    Column("recomputed", lambda row: None if row.peak is None else row.overhead, "{:.2%}".format),
    Column("bound", "bound", format_seconds),
    Column("gap", "gap", format_gap),
    Column("solved in", "seconds", format_seconds),
)


def _status(row: Row) -> str:
    refusal = row.solution.refusal
    reason = (row.message if refusal is None else refusal.reason).partition(";")[0]
    note = f": {reason}" if reason and row.peak is None else ""
    return row.status.label + (note if row.from_budget is None else f", from {format_bytes(row.from_budget)}")


def frontier(
    problem: Problem,
    budgets: Iterable[int | float | str] | int | float | str | None = None,
    *,
    methods: Sequence[str] = ("auto",),
    time_limit: float = 60.0,
    gap: float = 1e-4,
    jobs: int | None = None,
    client: Any = None,
    rules: Rules | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Frontier:
    """The cost of a step for many budgets, by one or several methods.

    Ctrl-C ends it with what has been found, if anything.

    Args:
        budgets: bytes, or text such as ``"8 GB"``, many or one; by default a few from the smallest that works to
            keeping everything.
        methods: of `checkmate.methods()`.
        time_limit: seconds for each pair of a method and a budget.
        gap: stop each once (cost - bound) / cost is at most this.
        jobs: processes at a time; by default as many as the machine has cores. 1 solves within this process.
        client: run the solves there instead: anything with ``submit(call, *arguments)`` that gives a future with
            ``result()``, such as an executor of `concurrent.futures` or Dask's ``distributed.Client``. For Ray it is an
            object whose ``submit`` returns ``ray.remote(call).remote(*arguments).future()``.
        rules, progress: as for `checkmate.solve`.
        options: of the methods; each goes to those that take it.

    Returns:
        A row for each pair; one whose solve failed is NOT_FOUND, with a message, or has the plan of a smaller budget.

    Raises:
        BudgetError: if a budget is no positive number of bytes.
        TypeError: if the problem is none.
        RuleError: if a rule names nothing, cannot be obeyed, or is none that a method can follow.
        ValueError: if a method or an option is unknown, or a limit is out of range.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> [(row.budget, row.cost, row.status) for row in frontier(problem, ["3 B", 2], jobs=1)]
    [(2, inf, Status.INFEASIBLE), (3, 4.0, Status.OPTIMAL)]
    """
    check_problem(problem)
    problem = problem if rules is None else with_rules(problem, rules)
    if problem.next_split is not None:
        problem = replace(problem, next_split=None)  # it is the frontier of the step as it is, not split further
    if isinstance(budgets, (int, float, str)):
        budgets = (budgets,)
    if isinstance(methods, str):
        methods = (methods,)
    for method in methods:
        check_method(method)
    for option in options:
        if not any(option in METHODS[method].options for method in methods):
            check_method(methods[0], [option])
    options_of = {
        method: {name: value for name, value in options.items() if name in METHODS[method].options}
        for method in methods
    }
    for method in options_of:
        refuse_unknown_rules(problem, method)
    check_limits(time_limit, gap)
    if budgets is None:
        low, high = max(1, min_budget(problem).peak), max(1, problem.keep_all_peak)
        at = np.unique(np.linspace(low, high, BUDGETS).astype(np.int64)).tolist()
    else:
        at = sorted({parse_bytes(budget) for budget in budgets})
    pairs = [(method, budget) for method in options_of for budget in at]
    limits = {"time_limit": time_limit, "gap": gap}
    calls = [(problem, method, budget, {**limits, **options_of[method]}) for method, budget in pairs]
    solutions = _solve_all(calls, jobs, client, progress)
    rows = [Row.of(method, s) for (method, _), s in zip(pairs, solutions, strict=True)]
    # Share plans from smaller budgets, and bounds from larger ones, between the rows.
    best: dict[str, Row] = {}  # by method, of the budgets so far
    shared = []
    for row in rows:
        best_row = best.get(row.method)
        if best_row is not None and best_row.cost < row.cost:
            assert best_row.solution.schedule is not None
            fields = {name: getattr(row.solution, name) for name in ("seconds", "details", "interrupted", "method")}
            fields["message"] = row.message or f"the plan found for {format_bytes(best_row.budget)}"
            bound = 0.0 if contradicts(row.bound, best_row.cost) else row.bound
            solution = again(best_row.solution, row.solution.problem, row.budget, bound=bound, **fields)
            row = Row.of(row.method, solution, best_row.budget)
        elif row.solution.plan is not None:
            best[row.method] = row
        bounds = [other.bound for other in rows if other.budget >= row.budget]
        bound = max(b for b in [row.solution.problem.least_cost, *bounds] if not contradicts(b, row.cost))
        if bound > row.bound:
            row = Row.of(row.method, _certified(row.solution, bound), row.from_budget)
        shared.append(row)
    return Frontier(tuple(shared))


Case = tuple[Problem, str, int, dict[str, Any]]  # method, budget, options


def _solve_all(calls: list[Case], jobs: int | None, client: Any, progress: bool | None) -> list[Solution]:
    """Solve several calls, some in parallel; ``jobs``, ``client`` and ``progress`` as in `frontier`."""
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs is a number of processes, at least 1, not {jobs!r}.")
    jobs = min(len(calls) or 1, jobs or os.cpu_count() or 1)
    if client is not None or jobs > 1:
        with Processes(jobs) if client is None else nullcontext(client) as pool:
            return _solve_there(calls, pool, progress)
    # Here, one after another; an interruption keeps the answers so far.
    solutions: list[Solution] = []
    interrupted = False
    for problem, method, budget, options in calls:
        solution = _failed(problem, method, budget, "interrupted before it was solved")
        try:
            if not interrupted:
                solution = solve(problem, budget, method=method, progress=progress, **options)
                interrupted = solution.interrupted
        except CheckmateError as error:
            solution = _failed(problem, method, budget, str(error))
        except KeyboardInterrupt:
            if not solutions:
                raise
            interrupted = True
        solutions.append(solution)
    return solutions


def _solve_there(calls: list[Case], client: Any, progress: bool | None) -> list[Solution]:
    # Problems travel without their graph modules.
    bare = {id(problem): replace(problem, codegen=None) for problem, *_ in calls}
    futures = [client.submit(_answer, bare[id(problem)], *call) for problem, *call in calls]
    solutions: list[Solution] = []
    interrupted = False
    count = len(calls)
    with showing(lambda: f"{len(solutions)} of {count} solved", share=lambda: len(solutions) / count, shown=progress):
        for (problem, method, budget, _), future in zip(calls, futures, strict=True):
            solution = _failed(problem, method, budget, "interrupted before it was solved")
            try:
                if not interrupted or future.done():
                    # Trust no process: verify its answer here.
                    answer = replace(future.result(), problem=problem, budget=budget)
                    solution = _certified(answer, answer.bound)
                    log.info("frontier: %d of %d solved", len(solutions) + 1, count)
            except KeyboardInterrupt:
                interrupted = True
            except Exception as error:  # noqa: BLE001  # the other rows stay valid
                log.warning("frontier: %s within %s failed: %s", method, format_bytes(budget), error)
                solution = _failed(problem, method, budget, str(error))
            solutions.append(solution)
    if interrupted and all(solution.plan is None for solution in solutions):
        raise KeyboardInterrupt
    return solutions


def _answer(problem: Problem, method: str, budget: int, options: dict[str, Any]) -> Solution:
    """Solve in another process, and send back runs and figures without the parts that the parent has."""
    solution = solve(problem, budget, method=method, progress=False, **options)
    plan = None if solution.plan is None or solution.plan.is_a_schedule else solution.plan
    return replace(solution, problem=None, plan=plan)  # type: ignore[arg-type]


def _certified(answer: Solution, bound: float) -> Solution:
    """Verify the answer of another process here, and give it the proven bound."""
    if answer.schedule is None:
        status = Status.INFEASIBLE if bound == float("inf") else answer.status
        return replace(answer, bound=bound, status=status)
    fields = {name: getattr(answer, name) for name in ("seconds", "message", "details", "interrupted")}
    return again(answer, answer.problem, answer.budget, bound=bound, **fields)


def _failed(problem: Problem, method: str, budget: int, message: str) -> Solution:
    return Solution(Status.NOT_FOUND, problem, budget, method, bound=problem.least_cost, message=message)
