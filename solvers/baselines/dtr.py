"""Dynamic tensor rematerialization (Kirisame et al., ICLR 2021), staged: what it would run becomes the plan.

The runtime (`dtr_runtime`) is simulated under a budget; ops that it runs between the first executions of two ops in
turn belong to the later one's stage. We differ from the paper in what a static plan allows and asks for: a stage runs
each op once, in the order of the graph; runs that nobody uses are left out; memory is freed by liveness. So the plan
takes less memory than the runtime saw, or more, and the budget that the runtime is told is searched for, until the
simulated peak of the plan fits ours.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.dtr_runtime import OutOfTime, Runtime
from checkmate.solvers.baselines.dtr_scores import HEURISTICS
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.runs import as_matrix, cost_of, peak_of, without_useless
from checkmate.solvers.search.eviction import Stuck
from checkmate.units import format_bytes

METHOD = "dtr"
TRIES = 5  # budgets that the runtime is told, for each heuristic


def dtr(
    problem: Problem,
    budget: int,
    *,
    heuristic: str | None = None,
    ignore_small: bool = False,
    sample: bool = False,
    seed: int = 0,
    time_limit: float = 10.0,
) -> Solution:
    """What dynamic tensor rematerialization would run, as a plan. NOT_FOUND where no run fits.

    Args:
        problem: what to schedule.
        budget: bytes.
        heuristic: one of `checkmate.solvers.baselines.dtr_scores.HEURISTICS`; None tries them all and returns the
        cheapest plan.
            ``details`` says which it was, and what each of them cost.
        ignore_small: evict no value smaller than a hundredth of the mean, unless there is nothing else.
        sample: look at √n of the n values that could go, drawn at random.
        seed: of what is drawn.
        time_limit: seconds, shared evenly between the heuristics.

    Raises:
        ValueError: if there is no such heuristic.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> dtr(problem, 3, heuristic="h_eq").cost
    4.0
    """
    began = time.perf_counter()
    if heuristic is not None and heuristic not in HEURISTICS:
        raise ValueError(f"There is no heuristic {heuristic!r}. They are {', '.join(HEURISTICS)}.")
    names = tuple(HEURISTICS) if heuristic is None else (heuristic,)
    searches = {}
    for i, name in enumerate(names):
        rng = np.random.default_rng(seed) if sample else None
        search = Simulation(problem, budget, name, began + time_limit * (i + 1) / len(names), ignore_small, rng)
        search.run()
        searches[name] = search
    best = min(searches.values(), key=lambda search: search.cost)
    details: dict[str, object] = {
        "heuristic": best.name,
        "costs": {name: search.cost for name, search in searches.items()},
    }
    seconds = time.perf_counter() - began
    if best.R is not None:
        details["told"] = best.told
        return certify(problem, budget, best.R, method=METHOD, seconds=seconds, details=details)
    message, stuck = _explain(problem, list(searches.values()))
    return Solution(Status.NOT_FOUND, problem, budget, METHOD, seconds=seconds, message=message, stuck=stuck)


@dataclass
class Simulation:
    """The cheapest plan of one heuristic that fits, over the budgets that its runtime is told."""

    problem: Problem
    budget: int
    name: str
    deadline: float
    ignore_small: bool = False
    rng: np.random.Generator | None = None
    R: np.ndarray | None = None
    cost: float = float("inf")
    told: int = 0  # the budget that the best plan's runtime was told
    least_peak: int | None = None  # of the plans that do not fit
    stuck: Stuck | None = None
    out_of_time: bool = False

    def run(self) -> None:
        """Tell the runtime the budget, and then by bisection more or less, as its plan fits or not.

        Where everything can be kept the runtime is told that there is no pressure: it may hold what a pinned op made
        beyond its last use, and would evict to make room for that.
        """
        tables = Tables.of(self.problem)
        low, high = int(self.problem.unavoidable_bytes.max()), self.problem.keep_all_peak
        told = self.budget if self.budget < high else self.problem.resident + int(self.problem.sizes.sum()) + high
        for _ in range(TRIES):
            fits = self._try(tables, told)
            if fits is None:
                return
            low, high = (told + 1, high) if fits else (low, told - 1)
            if low > high:
                return
            told = (low + high) // 2

    def _try(self, tables: Tables, told: int) -> bool | None:
        """Whether the runtime can be told more; None where there is no time left."""
        try:
            stages = Runtime(
                tables,
                told,
                HEURISTICS[self.name],
                deadline=self.deadline,
                ignore_small=self.ignore_small,
                rng=self.rng,
            ).run()
        except OutOfTime:
            self.out_of_time = True
            return None
        if isinstance(stages, Stuck):
            self.stuck = stages
            return True
        R = without_useless(self.problem.graph, as_matrix(stages))
        peak = peak_of(self.problem, R)
        if peak > self.budget:
            self.least_peak = min(peak, self.least_peak or peak)
            return False
        cost = cost_of(self.problem, R)
        if cost < self.cost:
            self.R, self.cost, self.told = R, cost, told
        return True


def _explain(problem: Problem, searches: list[Simulation]) -> tuple[str, int | None]:
    """Why there is no plan, and the op in the way where one is known."""
    peaks = [search.least_peak for search in searches if search.least_peak is not None]
    stuck = next((search.stuck for search in reversed(searches) if search.stuck is not None), None)
    reasons = []
    if stuck is not None:
        op = problem.graph.ops[stuck.op].name
        reasons.append(f"nothing was left to evict at {op}, {format_bytes(stuck.missing_bytes)} short")
    if peaks:
        reasons.append(f"the plan of least peak takes {format_bytes(min(peaks))}")
    if any(search.out_of_time for search in searches):
        reasons.append("a run passed the time limit or went round in circles")
    return "; ".join(reasons), None if stuck is None else stuck.op
