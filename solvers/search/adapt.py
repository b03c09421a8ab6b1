"""Begin from a known plan: of the same step, or of the same ops with other sizes, such as a smaller batch.

A plan says what runs, and that is a schedule of any problem with the same graph; only whether it fits is another
question there. So it is carried over in two ways. If it fits it is taken, and what there is room for now need not run
again. And passes of eviction let go first of what the known plan does not keep: this repairs a plan that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints, renumbered, same_ops
from checkmate.core.problem import Problem
from checkmate.core.rules import without_rules
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution
from checkmate.errors import SolverError
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Task, certify
from checkmate.solvers.common.schedules import as_matrix, as_stages, cost_of, fits_budget
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.greedy import GRID, DeadEnd, run_pass
from checkmate.solvers.search.local_search import exchange

Start = Solution | Schedule
PASSES = 4  # of eviction, at most
OTHER_SIZE = "another size"  # where a plan is from
LARGER = 2  # known plans of larger sizes that are looked at
ADAPT_SECONDS = 0.1  # to adapt the cheapest of them
NEARLY = 0.005  # of the least that a step takes: so near, none is adapted


def as_schedule(problem: Problem, start: Start) -> Schedule:
    """The schedule of a known plan to start from.

    Raises:
        ValueError: if it has none, or one that is wrong for this problem whatever the budget.
    """
    schedule = start.schedule if isinstance(start, Solution) else start
    if not isinstance(schedule, Schedule):
        raise ValueError(f"A start is a Solution with a plan, or a Schedule, not {start!r}.")
    T = len(problem.graph.ops)
    if schedule.R.shape != (T, T):
        raise ValueError(f"The start is a schedule of {len(schedule.R)} ops, but the problem has {T}.")
    schedule = Schedule.from_runs(problem.graph, schedule.R)
    plain = without_rules(problem).with_host(None)  # one that breaks rules can be made into one that obeys them
    if wrong := simulator.check_plan(simulator.lower(problem, schedule), plain):
        raise ValueError(f"The start is a schedule of another problem: {wrong[0]}.")
    return schedule


def as_start(solution: Solution, problem: Problem) -> Start | None:
    """A known plan of a step, to begin with at another size; None if there is none that is valid there.

    Where the order of ops is another one there, each op takes along what runs again in its stage.
    """
    numbers = renumbered(solution.problem, problem)
    if numbers is None or solution.schedule is None:
        return None
    if same_ops(solution.problem, problem):
        return solution
    ops = np.array(numbers[0])
    schedule = Schedule.from_runs(problem.graph, np.tril(solution.schedule.R[np.ix_(ops, ops)]))
    return (
        None
        if simulator.check_plan(simulator.lower(problem, schedule), without_rules(problem).with_host(None))
        else schedule
    )


def proven_by(problem: Problem, budget: int, start: Start) -> float:
    """Seconds that every schedule takes, as proven for the start; 0.0 if that was for another problem.

    A bound holds for the same graph, sizes and costs, for no more bytes beside what is resident, and where there are
    rules in addition.
    """
    if not isinstance(start, Solution):
        return 0.0
    if fingerprints(start.problem) not in (fingerprints(problem), fingerprints(without_rules(problem))):
        return 0.0
    return start.bound if budget - problem.resident <= start.budget - start.problem.resident else 0.0


def adapt(task: Task, R: np.ndarray) -> np.ndarray | None:
    """The best schedule (T, T) within the budget that is quickly made from a known one; None if none is.

    One pass is made even without time.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> adapt(Task(chain, 3), np.tril(np.ones((4, 4), dtype=bool))).sum()
    np.int64(4)
    """
    # Passes that let go first of what the schedule does not keep for the next stage; those that fit.
    outside = ~Schedule.from_runs(task.problem.graph, R).S[1:]
    tables, schedules = Tables.of(task.problem), list[np.ndarray]()
    for passes, weights in enumerate(GRID):
        if schedules and passes >= PASSES:
            break
        stages = run_pass(tables, task.budget, replace(weights, outside=outside))
        if not isinstance(stages, DeadEnd):
            schedules.append(as_matrix(stages))
        if task.clock.is_over:
            break
    if (not schedules or not task.clock.is_over) and fits_budget(task.problem, task.budget, R):
        schedules.append(as_matrix(drop_runs(task.problem, task.budget, as_stages(R), task.clock)))
    if not schedules:
        return None
    return as_matrix(exchange(task, as_stages(min(schedules, key=lambda runs: cost_of(task.problem, runs)))))


def cheapest_known(problem: Problem, budget: int, solutions: Sequence[Solution]) -> Solution | None:
    """The cheapest plan that fits among those of the same ops at other sizes, adapted, or all kept; None if none fits.

    Where some of them run the loss in parts, the step is split until one of them fits.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> cheapest_known(chain, 4, []).cost
    4.0
    """
    if budget >= problem.keep_all_peak and not problem.limits.recomputed:
        return certify(problem, budget, _all_kept(problem), method="checkpoint-all", origin=OTHER_SIZE)
    in_parts = any(solution.problem.splits for solution in solutions)
    for split in problem.splits_in_turn() if in_parts else [problem]:
        best = _fitting(split, budget, solutions)
        if best is None and (not in_parts or split.unavoidable_bytes.max() > budget):
            continue
        if best is not None and best.cost <= (1 + NEARLY) * split.least_cost:
            return best
        # Run less again, where there is room for that here.
        start = _all_kept(split) if best is None or best.schedule is None else best.schedule.R
        adapted = adapt(Task(split, budget, Clock(ADAPT_SECONDS)), start)
        if adapted is not None and (best is None or cost_of(split, adapted) < cost_of(split, start)):
            with suppress(SolverError):  # it breaks a rule
                return certify(split, budget, adapted, method=(best or solutions[0]).method, origin=OTHER_SIZE)
        if best is not None:
            return best
    return None


def _fitting(problem: Problem, budget: int, solutions: Sequence[Solution]) -> Solution | None:
    """The cheapest plan that fits, of the next larger sizes and of the next smaller one; else the first other one."""
    size, T = problem.keep_all_peak, len(problem.graph.ops)
    near = [plan for plan in solutions if plan.schedule is not None and len(plan.problem.graph.ops) == T]
    near.sort(key=lambda plan: abs(plan.problem.keep_all_peak - size))
    larger, smaller = ([s for s in near if (s.problem.keep_all_peak >= size) == is_so] for is_so in (True, False))
    for group in (larger[:LARGER] + smaller[:1], *([plan] for plan in (*larger[LARGER:], *smaller[1:]))):
        before: np.ndarray | None = None  # many plans run the same
        runs = [(solution.method, solution.schedule.R) for solution in group if solution.schedule is not None]
        for method, R in sorted(runs, key=lambda run: cost_of(problem, run[1])):
            if before is None or not np.array_equal(R, before):
                with suppress(SolverError):
                    return certify(problem, budget, R, method=method, origin=OTHER_SIZE)
            before = R
    return None


def _all_kept(problem: Problem) -> np.ndarray:
    return np.eye(len(problem.graph.ops), dtype=bool)
