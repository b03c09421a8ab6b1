"""The task of a method, and its incumbent: the best plan and the best bound yet, shared by all stages of a solve.

A method offers each schedule as soon as it has it, and each bound. So a solve that is interrupted, or one of whose
solvers fails, still has its best plan, and a person at a terminal sees the gap close. What is offered is lowered to a
plan, simulated and verified before it is taken, and this very plan is the answer; a plan that comes from elsewhere, as
from a file or another process, passes `certify`.
On the main path, 12 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import Usage
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status, format_gap
from checkmate.errors import SolverError
from checkmate.solvers.common.schedules import Stages, as_matrix, cost_of, peak_of
from checkmate.units import format_seconds


class OutOfTime(Exception):
    """Raised when the time is over, or when continuing gains nothing."""


@dataclass(frozen=True)
class Clock:
    """Counts seconds since it was made, up to so many.

    >>> clock = Clock(60.0)
    >>> clock.is_over, 17 < clock.share(0.3).left <= 18
    (False, True)
    """

    seconds: float = float("inf")
    began: float = field(default_factory=lambda: time.perf_counter())

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds that are left, 0.0 once it is over."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def is_over(self) -> bool:
        """Tell whether no second is left."""
        return self.elapsed >= self.seconds

    def share(self, part: float) -> Clock:
        """A clock that begins now, with this share of the seconds left."""
        return Clock(part * self.left)


@dataclass(frozen=True)
class Task:
    """Schedule a problem within a budget, as well as the time allows."""

    problem: Problem
    budget: int  # bytes
    clock: Clock = field(default_factory=Clock)
    gap: float = 0.0  # (cost - bound) / cost that is good enough
    threads: int = 1  # of solvers
    seed: int = 0  # of what is drawn at random

    def within(self, seconds: float, **changes: Any) -> Task:
        """The task with this many seconds from now, and with other changes."""
        return replace(self, clock=Clock(seconds), **changes)


TOLERANCE = 1e-4  # a bound may exceed a cost by this share of it, from the tolerances of solvers
NOTABLE = 1e-4  # a bound that rises by a smaller share is not worth a line: solvers report hundreds of them
log = logging.getLogger("checkmate.solve")


@dataclass(frozen=True)
class Remarks:
    """A method's message and figures, beside the plans and bounds that it offered."""

    message: str = ""  # why there is no plan, or why it ended early
    details: dict[str, Any] = field(default_factory=dict)  # figures
    method: str | None = None  # the name to answer by, if it is another one
    stuck: int | None = None  # the op at which nothing was left to evict
    interrupted: bool = False  # by Ctrl-C


class Incumbent:
    """The cheapest schedule that is known to fit, and the highest bound that is proven.

    >>> from checkmate.core.problem import Problem
    >>> incumbent = Incumbent(Task(Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4]), budget=8))
    >>> incumbent.offer(np.eye(2, dtype=bool), by="hand"), incumbent.cost, incumbent.bound
    (True, 2.0, 2.0)
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.best: Solution | None = None  # verified; the bounds are those below
        self.cost = float("inf")  # seconds, of the best
        self.bound = task.problem.least_cost  # seconds that every plan within the budget takes
        self.least_peak: int | None = None  # bytes, of all schedules that were simulated
        self.found: dict[str, float] = {}  # by whom -> the last cost that was the least so far
        self.trajectory: list[tuple[float, float, float]] = []  # (seconds, cost, bound) at each notable change
        self._lock = threading.Lock()  # solvers report from threads of their own

    @property
    def R(self) -> np.ndarray | None:
        """R (T, T) bool of the best plan. The plan may say more: orders, repeats, transfers."""
        return None if self.best is None or self.best.schedule is None else self.best.schedule.R

    @property
    def plan(self) -> Plan | None:
        """The best plan."""
        return None if self.best is None else self.best.plan

    @property
    def gap(self) -> float:
        """(cost - bound) / cost."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0

    def worth(self, settle: float) -> float:
        """The share of the time limit to spend on this gap: all of it if the gap is ``settle`` or more."""
        return min(1.0, self.gap / settle) if settle else 1.0

    @property
    def is_infeasible(self) -> bool:
        """True if it is proven that no schedule fits the budget."""
        return self.bound == float("inf")

    def fits(self, R: np.ndarray) -> bool:
        """Simulate a schedule (T, T), and tell whether it stays within the budget."""
        return self._is_within(peak_of(self.task.problem, R))

    def offer(self, found: np.ndarray | Stages | Plan, by: str) -> bool:
        """Keep a plan if it fits the budgets and is cheaper than the best; tell whether it was kept.

        Args:
            found: a schedule R (T, T); or the ops that run in each stage, in any order and any number of times; or a
                plan, which may say more than either. Stages out of order may break rules that the problem has in words,
                which searches do not know: then they are not kept.

        Raises:
            SolverError: if it breaks another rule than the budgets; whoever offers it is wrong then, not the problem.
        """
        problem = self.task.problem
        if isinstance(found, list) and all(ops == sorted(set(ops)) for ops in found):
            found = as_matrix(found)
        if isinstance(found, np.ndarray):
            if (cost := cost_of(problem, found)) >= self.cost:
                return False
            schedule = Schedule.from_runs(problem.graph, found.copy())
            return self._take(simulator.lower(problem, schedule), schedule, cost, f"The schedule of {by}", by)
        if isinstance(found, list):
            found = simulator.without_slower_ways(simulator.lower_runs(problem, found), problem, self.task.budget)
            if problem.rules and simulator.check_plan(found, problem):
                return False
        trimmed = simulator.without_idle_values(found, problem)
        if trimmed is not found and not simulator.check_plan(trimmed, problem):  # a rule may ask to keep some
            found = trimmed
        cost = simulator.cost(found, problem)
        return cost < self.cost and self._take(found, None, cost, f"The plan of {by}", by)

    def _take(self, plan: Plan, schedule: Schedule | None, cost: float, title: str, by: str) -> bool:
        """Simulate and verify a plan, and keep it if it fits and still is the cheapest."""
        problem, budget = self.task.problem, self.task.budget
        usage, host_budget = simulator.simulate(plan, problem), 0 if problem.host is None else problem.host.budget
        complete = schedule is None or schedule.R.diagonal().all()  # an incomplete one is a fault, not too large
        if complete and (not self._is_within(usage.peak) or usage.host_peak > host_budget):
            return False
        if schedule is not None and (roomier := simulator.without_slower_ways(plan, problem, budget)) is not plan:
            plan, usage = roomier, simulator.simulate(roomier, problem)
        schedule = schedule or Schedule.of_plan(problem.graph, plan, problem.kept)
        best = _verified(problem, budget, schedule, plan, usage, title)
        with self._lock:
            if cost >= self.cost:
                return False
            if contradicts(self.bound, cost):
                message = "a bound of %.6g s was wrong: a verified schedule of %s takes %.6g s"
                log.log(_gravity(plan), message, self.bound, by, cost)
                self.bound = problem.least_cost
            self.best, self.cost, self.found[by] = best, cost, cost
            self._record(by)
        return True

    def prove(self, bound: float) -> None:
        """Keep a lower bound in seconds if it is better and no known schedule contradicts it.

        Infinite: no schedule fits the budget.
        """
        with self._lock:
            if contradicts(bound, self.cost):
                message = "a bound of %.6g s is wrong: a verified schedule takes %.6g s"
                log.log(_gravity(self.plan), message, bound, self.cost)
            elif bound > self.bound:  # false for NaN
                self.bound = bound
                last = self.trajectory[-1][2] if self.trajectory else 0.0
                if bound > last * (1 + NOTABLE):
                    self._record("bound")

    def now(self, method: str, **fields: Any) -> Solution:
        """The best plan with its bound, while the search continues."""
        with self._lock:
            best, bound = self.best, self.bound
        assert best is not None
        return _with_bound(best, bound, method=method, **fields)

    def solution(self, method: str, remarks: Remarks) -> Solution:
        """The answer: the best plan with remarks, or the reason why there is none."""
        task, method = self.task, remarks.method or method
        fields: dict[str, Any] = {"message": remarks.message, "details": remarks.details}
        if self.best is None:
            status = Status.INFEASIBLE if self.is_infeasible else Status.NOT_FOUND
            fields |= {"bound": self.bound, "stuck": remarks.stuck, "seconds": task.clock.elapsed}
            return Solution(status, task.problem, task.budget, method, **fields)
        answer = self.now(method, **fields, interrupted=remarks.interrupted)
        spent, low, high = task.clock.elapsed, answer.bound, answer.cost  # others differ in the last digit of a sum
        path = [(seconds, max(cost, high), min(bound, low)) for seconds, cost, bound in self.trajectory]
        return replace(answer, seconds=spent, details={**answer.details, "trajectory": [*path, (spent, high, low)]})

    def line(self) -> str:
        """Describe the overhead, the gap and the time in a line for the terminal."""
        return f"{self._plan()}, {self.task.clock.elapsed:.0f} of {self.task.clock.seconds:g} s"

    def _is_within(self, peak: int) -> bool:
        self.least_peak = peak if self.least_peak is None else min(peak, self.least_peak)
        return peak <= self.task.budget

    def _plan(self) -> str:
        return "no plan yet" if self.best is None else f"step {self._over(self.cost)}, gap {format_gap(self.gap)}"

    def _over(self, seconds: float) -> str:
        return f"{seconds / (self.task.problem.keep_all_cost or 1.0) - 1:+.2%}"

    def _record(self, by: str) -> None:
        spent = self.task.clock.elapsed
        self.trajectory.append((spent, self.cost, min(self.bound, self.cost)))
        log.info("%s: %s, bound %s after %s", by, self._plan(), self._over(self.bound), format_seconds(spent))


Solver = Callable[[Task, Incumbent], Remarks]


def _gravity(plan: Plan | None) -> int:
    """The log level for a bound that a plan contradicts: bounds hold for schedules, so other plans may beat them."""
    return logging.WARNING if plan is None or plan.is_a_schedule or plan.moves else logging.DEBUG


def certify(
    problem: Problem, budget: int, candidate: np.ndarray | Plan, *, method: str, bound: float = 0.0, **fields: Any
) -> Solution:
    """Verify and simulate R (T, T), or a plan that says more, and make it a Solution.

    The bound is raised to the cost of running each op once, which every plan takes; one that this schedule
    contradicts was no proof, and does not count. OPTIMAL where the bound meets the cost within `OPTIMAL_GAP`.

    Raises:
        SolverError: if it breaks a rule or exceeds a budget; the method is wrong then, not the problem.
    """
    if isinstance(candidate, Plan):
        plan, schedule = candidate, Schedule.of_plan(problem.graph, candidate, problem.kept)
    else:
        schedule = Schedule.from_runs(problem.graph, candidate)
        plan = simulator.without_slower_ways(simulator.lower(problem, schedule), problem, budget)
    best = _verified(problem, budget, schedule, plan, simulator.simulate(plan, problem), f"The schedule of {method}")
    return _with_bound(best, bound, method=method, **fields)


def _verified(problem: Problem, budget: int, schedule: Schedule, plan: Plan, usage: Usage, title: str) -> Solution:
    """Verify a simulated plan, and make it a Solution without a proven bound."""
    if wrong := simulator.check_plan(plan, problem, budget, usage):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SolverError(f"{title} is wrong: {wrong[0]}{more}.")
    cost = simulator.cost(plan, problem)
    return Solution(Status.FEASIBLE, problem, budget, "", schedule, plan, cost, peak=usage.peak)


def _with_bound(best: Solution, bound: float, *, method: str, **fields: Any) -> Solution:
    """A verified plan with a bound as `certify` takes it."""
    problem, plan, cost = best.problem, best.plan, best.cost
    assert plan is not None
    if contradicts(bound, cost):
        log.warning("a bound of %s, %.6g s, was wrong: a verified schedule takes %.6g s", method, bound, cost)
        bound = problem.least_cost
    one_clock = not plan.moves and not problem.graph.links
    runs_once = one_clock and len(plan.runs) == len(problem.graph.ops)  # the least, whatever is lost in its sum
    bound = max(problem.least_cost, bound)  # in this order, what is no number is no bound
    bound = cost if runs_once else min(bound, cost)
    status = Status.OPTIMAL if cost - bound <= OPTIMAL_GAP * cost else Status.FEASIBLE
    return replace(best, status=status, method=method, bound=bound, **fields)


def again(solution: Solution, problem: Problem, budget: int, *, bound: float = 0.0, **fields: Any) -> Solution:
    """Certify a solution's plan anew, for this problem and budget.

    Raises:
        SolverError: if it breaks a rule there or exceeds a budget.
    """
    assert solution.schedule is not None
    plan = solution.schedule.R if solution.plan is None or solution.plan.is_a_schedule else solution.plan
    return certify(problem, budget, plan, bound=bound, **{"method": solution.method, **fields})


def contradicts(bound: float, cost: float) -> bool:
    """Tell whether a schedule of this cost refutes a lower bound, beyond the tolerance of solvers."""
    return bound > cost * (1 + TOLERANCE)
