"""The best plan and the best bound of a task yet, shared by all methods and stages of a solve.

A method offers each schedule as soon as it has it, and each bound. So a solve that is interrupted, or one of whose
solvers fails, still has its best plan, and a person at a terminal sees the gap close. Every Solution is made by
`certify`, which lowers the schedule to a plan, verifies and simulates it.
On the main path, 12 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status
from checkmate.errors import SolverError
from checkmate.solvers.common.schedules import as_matrix, cost_of, lowered, peak_of
from checkmate.solvers.common.task import Task
from checkmate.units import format_seconds

TOLERANCE = 1e-4  # a bound may exceed a cost by this share of it, from the tolerances of solvers
NOTABLE = 1e-4  # a bound that rises by a smaller share is not worth a line: solvers report hundreds of them
log = logging.getLogger("checkmate.solve")


@dataclass(frozen=True)
class Remarks:
    """A method's message and figures, beside the plans and bounds that it offered."""

    message: str = ""  # why there is no plan, or why it ended early
    details: dict[str, Any] = field(default_factory=dict)  # figures
    method: str | None = None  # what answered, where that goes by another name
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
        self.R: np.ndarray | None = None  # (T, T) bool
        self.plan: Plan | None = None  # of R, where that does not say all of it
        self.cost = float("inf")  # seconds, of R
        self.bound = task.problem.least_cost  # seconds that every plan within the budget takes
        self.least_peak: int | None = None  # bytes, of all schedules that were simulated
        self.found: dict[str, float] = {}  # by whom -> the last cost that was the least so far
        self.trajectory: list[tuple[float, float, float]] = []  # (seconds, cost, bound) at each notable change
        self._lock = threading.Lock()  # solvers report from threads of their own

    @property
    def gap(self) -> float:
        """(cost - bound) / cost."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0

    def worth(self, settle: float) -> float:
        """The share of the time limit that closing the gap is worth, where that of ``settle`` is worth all of it."""
        return min(1.0, self.gap / settle) if settle else 1.0

    @property
    def is_infeasible(self) -> bool:
        """True if it is proven that no schedule fits the budget."""
        return self.bound == float("inf")

    def fits(self, R: np.ndarray) -> bool:
        """Whether a schedule (T, T) stays within the budget, simulated."""
        return self._is_within(peak_of(self.task.problem, R))

    def offer(self, R: np.ndarray, by: str) -> bool:
        """Keep a schedule (T, T) if it fits the budget and is cheaper than the best; tell whether it is kept.

        Raises:
            SolverError: if it breaks another rule than the budget; whoever offers it is wrong then, not the problem.
        """
        problem, budget = self.task.problem, self.task.budget
        cost = cost_of(problem, R)
        if cost >= self.cost:
            return False
        plan = lowered(problem, R)
        if R.diagonal().all() and not self._is_within(simulator.simulate(plan, problem).peak):
            return False
        if wrong := simulator.verify(plan, problem, budget):
            raise SolverError(f"The schedule of {by} is wrong: {wrong[0]}.")
        return self._keep(R.copy(), None, cost, by)

    def offer_runs(self, stages: list[list[int]], by: str) -> bool:
        """As `offer`, for the ops that run in each stage, in any order and as often as need be.

        Raises:
            SolverError: if it breaks another rule than the budget, or those that the problem has in words.
        """
        if all(ops == sorted(set(ops)) for ops in stages):
            return self.offer(as_matrix(stages), by)
        problem = self.task.problem
        plan = simulator.without_slower_ways(simulator.lower_runs(problem, stages), problem, self.task.budget)
        broken = problem.rules and simulator.verify(plan, problem)  # searches know not all of these
        return not broken and self.offer_plan(plan, by)

    def offer_plan(self, plan: Plan, by: str) -> bool:
        """Offer a plan of which R may not say all.

        Raises:
            SolverError: if it breaks another rule than the budgets.
        """
        problem, budget = self.task.problem, self.task.budget
        trimmed = simulator.without_idle_values(plan, problem)
        if trimmed is not plan and not simulator.verify(trimmed, problem):  # a rule may ask to keep some
            plan = trimmed
        cost, usage = simulator.cost(plan, problem), simulator.simulate(plan, problem)
        there = 0 if problem.host is None else problem.host.budget
        if cost >= self.cost or not self._is_within(usage.peak) or usage.host_peak > there:
            return False
        if wrong := simulator.verify(plan, problem, budget):
            raise SolverError(f"The plan of {by} is wrong: {wrong[0]}.")
        return self._keep(Schedule.of_plan(problem.graph, plan).R, plan, cost, by)

    def _keep(self, R: np.ndarray, plan: Plan | None, cost: float, by: str) -> bool:
        """Take a verified plan, if it still is the cheapest."""
        with self._lock:
            if cost >= self.cost:
                return False
            if contradicts(self.bound, cost):
                log.log(
                    _gravity(plan),
                    "a bound of %.6g s was wrong: a verified schedule of %s takes %.6g s",
                    self.bound,
                    by,
                    cost,
                )
                self.bound = self.task.problem.least_cost
            self.R, self.plan, self.cost, self.found[by] = R, plan, cost, cost
            self._record(by)
        return True

    def prove(self, bound: float) -> None:
        """Keep a lower bound in seconds, if it is better and no known schedule contradicts it.

        Infinite: no schedule fits the budget.
        """
        with self._lock:
            if contradicts(bound, self.cost):
                log.log(
                    _gravity(self.plan),
                    "a bound of %.6g s is wrong: a verified schedule takes %.6g s",
                    bound,
                    self.cost,
                )
            elif bound > self.bound:  # what is no number is no bound
                self.bound = bound
                last = self.trajectory[-1][2] if self.trajectory else 0.0
                if bound > last * (1 + NOTABLE):
                    self._record("bound")

    def now(self, method: str) -> Solution:
        """The best plan with its bound, certified, while the search goes on."""
        with self._lock:
            found, bound = self._found, min(self.bound, self.cost)
        return certify(self.task.problem, self.task.budget, found, method=method, bound=bound)

    def solution(self, method: str, remarks: Remarks) -> Solution:
        """Answer with the best plan, certified, and remarks; or say that there is none."""
        task, method, spent = self.task, remarks.method or method, self.task.clock.elapsed
        about: dict[str, Any] = {"bound": self.bound, "message": remarks.message, "seconds": spent}
        if self.R is None:
            status = Status.INFEASIBLE if self.is_infeasible else Status.NOT_FOUND
            about |= {"details": remarks.details, "stuck": remarks.stuck}
            return Solution(status, task.problem, task.budget, method, **about)
        about["interrupted"] = remarks.interrupted
        answer = certify(task.problem, task.budget, self._found, method=method, **about)
        low, high = answer.bound, answer.cost  # what differs from them does in the last digit of a sum
        path = [(seconds, max(cost, high), min(bound, low)) for seconds, cost, bound in self.trajectory]
        return replace(answer, details={**remarks.details, "trajectory": [*path, (spent, high, low)]})

    @property
    def _found(self) -> np.ndarray | Plan:
        assert self.R is not None
        return self.R if self.plan is None else self.plan

    def line(self) -> str:
        """Describe the overhead, the gap and the time in a line for the terminal."""
        return f"{self._plan()}, {self.task.clock.elapsed:.0f} of {self.task.clock.limit:g} s"

    def _is_within(self, peak: int) -> bool:
        self.least_peak = peak if self.least_peak is None else min(peak, self.least_peak)
        return peak <= self.task.budget

    def _plan(self) -> str:
        return "no plan yet" if self.R is None else f"step {self._over(self.cost)}, gap {self.gap:.2%}"

    def _over(self, seconds: float) -> str:
        return f"{seconds / (self.task.problem.keep_all_cost or 1.0) - 1:+.2%}"

    def _record(self, by: str) -> None:
        spent = self.task.clock.elapsed
        self.trajectory.append((spent, self.cost, min(self.bound, self.cost)))
        log.info("%s: %s, bound %s after %s", by, self._plan(), self._over(self.bound), format_seconds(spent))


def _gravity(plan: Plan | None) -> int:
    """Log level for a bound that a plan contradicts: proofs for schedules say nothing of other plans."""
    return logging.WARNING if plan is None or plan.is_a_schedule or plan.sent else logging.DEBUG


def certify(
    problem: Problem, budget: int, found: np.ndarray | Plan, *, method: str, bound: float = 0.0, **fields: object
) -> Solution:
    """Verify and simulate R (T, T), or a plan of which R may not say all, and make it a Solution.

    The bound is raised to the cost of running each op once, which every plan takes; one that this schedule
    contradicts was no proof, and does not count. OPTIMAL where the bound meets the cost within `OPTIMAL_GAP`.

    Raises:
        SolverError: if it breaks a rule or exceeds a budget; the method is wrong then, not the problem.
    """
    if isinstance(found, Plan):
        plan, schedule = found, Schedule.of_plan(problem.graph, found)
    else:
        schedule = Schedule.from_runs(problem.graph, found)
        plan = simulator.without_slower_ways(simulator.lower(problem, schedule), problem, budget)
    if wrong := simulator.verify(plan, problem, budget):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SolverError(f"The schedule of {method} is wrong: {wrong[0]}{more}.")
    cost = simulator.cost(plan, problem)
    if contradicts(bound, cost):
        log.warning("a bound of %s, %.6g s, was wrong: a verified schedule takes %.6g s", method, bound, cost)
        bound = problem.least_cost
    T = len(problem.graph.ops)
    one_clock = not plan.sent and not problem.graph.links
    runs_once = one_clock and len(plan.runs) == T  # the least there is, whatever is lost in its sum
    bound = max(problem.least_cost, bound)  # in this order, what is no number is no bound
    bound = cost if runs_once else min(bound, cost)
    status = Status.OPTIMAL if cost - bound <= OPTIMAL_GAP * cost else Status.FEASIBLE
    peak = simulator.simulate(plan, problem).peak
    return Solution(status, problem, budget, method, schedule, plan, cost, bound, peak, **fields)  # type: ignore[arg-type]


def again(known: Solution, problem: Problem, budget: int, *, bound: float = 0.0, **fields: object) -> Solution:
    """The plan of a solution, certified anew for this problem and budget.

    Raises:
        SolverError: if it breaks a rule there or exceeds a budget.
    """
    assert known.schedule is not None
    about = {"method": known.method, **fields}
    found = known.schedule.R if known.plan is None or known.plan.is_a_schedule else known.plan
    return certify(problem, budget, found, bound=bound, **about)  # type: ignore[arg-type]


def contradicts(bound: float, cost: float) -> bool:
    """Whether a lower bound cannot be true if a schedule has this cost, beyond what solvers round."""
    return bound > cost * (1 + TOLERANCE)
