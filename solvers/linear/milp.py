"""The two methods of Jain et al., MLSys 2020, by HiGHS: their exact model, and its relaxation rounded in two phases.

The model is that of `checkmate.solvers.linear.equations`. Phase one of the rounding (Section 5) turns the relaxation's
S* into a set of kept values: S = [S* >= θ]. Phase two runs the least that this S needs. The plan may break the budget,
so the relaxation is solved at (1 - ε) · budget. We differ from the paper in three ways: thresholds θ are swept, not
only 1/2 or tosses of a coin for each S*; ε is bisected by whether θ = 1/2 fits the budget, not fixed at 0.1; a plan
that fits loses the runs it can do without. The bound is the relaxation's.

On the main path, 11 of 16: see docs/idea.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import OPTIMAL_GAP
from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import cost_of, fits_budget, obeys_limits, peak_of, without_useless
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import Variables, build, cost_unit, without_spare
from checkmate.solvers.linear.highs import SolveStatus
from checkmate.solvers.linear.model import NONE, Model
from checkmate.units import exact_bytes

ATTEMPTS = 4  # at a schedule that breaks the budget by less than the solver's tolerance
STEPS = 8  # of the bisection of ε
TRIES = 24  # thresholds at each ε
WORTH_A_LOOK = 2.0  # times the least cost so far: what is dearer will not be cheaper without needless runs


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
    R, margin = incumbent.R, 0

    def report(model: Model, x: Variables, values: np.ndarray) -> None:
        with contextlib.suppress(SolverError):  # the answer at the end decides whether the solver is right
            incumbent.offer(model.value(values, x.R).round().astype(bool), "milp")

    for _ in range(ATTEMPTS):
        model, x = build(*without_spare(problem, budget - margin), formulation=formulation)
        places = x.R != NONE  # runs without a variable are of no use
        result = highs.run(
            model,
            time_limit=task.clock.left,
            gap=task.gap,
            threads=task.threads,
            start=None if R is None else (x.R[places], R[places]),
            target=None if target is None else target / unit,
            on_incumbent=partial(report, model, x),
            on_bound=None if margin else lambda bound: incumbent.prove(bound * unit),
        )
        if not margin:  # only the model of the whole budget proves anything
            incumbent.prove(result.bound * unit)
        if result.x is None:
            break
        answer = model.value(result.x, x.R).round().astype(bool)
        incumbent.offer(answer, "milp")
        if (excess := peak_of(problem, answer) - budget) <= 0:
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


def lp_rounding(task: Task, incumbent: Incumbent) -> Remarks:
    """The best plan within the budget that rounding the linear relaxation gives, with the relaxation's bound.

    No plan where no rounding fits; that none is possible is proven where the relaxation has no solution.

    >>> from checkmate import solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> solve(problem, 3, method="lp-rounding").cost
    4.0
    """
    problem, budget, clock = task.problem, task.budget, task.clock
    solved, best = 0, 0.0
    # Bisect for the least slack epsilon at which rounding fits.
    low, high = 0.0, 1.0 - float(problem.unavoidable_bytes.max()) / budget  # beyond it there is no S*
    epsilon = 0.0
    while solved <= STEPS and not clock.is_over:
        relaxed = relax(problem, int((1 - epsilon) * budget), time_limit=clock.left, threads=task.threads)
        solved += 1
        if solved == 1:
            incumbent.prove(relaxed.bound)
        if relaxed.S is not None:
            for R in roundings(problem, relaxed.S):
                if _offer(task, incumbent, R):
                    best = epsilon
        elif solved == 1:
            break
        # Less slack if plain rounding fits, else more.
        if relaxed.S is None or incumbent.fits(rounded(problem, relaxed.S >= 0.5)):
            high = epsilon
        else:
            low = epsilon
        if high <= low or incumbent.cost <= incumbent.bound * (1 + OPTIMAL_GAP):
            break
        epsilon = (low + high) / 2
    return Remarks(details={"epsilon": best, "relaxations": solved})


def _offer(task: Task, incumbent: Incumbent, R: np.ndarray) -> bool:
    """Remove useless runs from R, and offer it if it may then be cheaper than the best."""
    problem = task.problem
    if cost_of(problem, R) >= WORTH_A_LOOK * incumbent.cost or not incumbent.fits(R) or not obeys_limits(problem, R):
        return False
    # Drop repeated runs, the most expensive first, whose outputs can be kept since the run before instead.
    again = np.argwhere(np.tril(R, -1))
    for t, k in again[np.argsort(-problem.seconds[again[:, 1]], kind="stable")]:
        if R[t, k] and not task.clock.is_over:
            fewer = R.copy()
            fewer[t, k] = False
            fewer = without_useless(problem.graph, fewer)
            R = fewer if fits_budget(problem, task.budget, fewer) else R
    return incumbent.offer(R, "lp-rounding")


def roundings(problem: Problem, S: np.ndarray) -> Iterator[np.ndarray]:
    """(T, T) bool schedules from S* (T, V), by up to `TRIES` thresholds."""
    seen: set[bytes] = set()
    values = np.unique(S[S > 1e-9].round(6)) if (S > 1e-9).any() else np.ones(1)
    thresholds = values[np.unique(np.linspace(0, len(values) - 1, TRIES).astype(int))]
    for threshold in thresholds:
        R = rounded(problem, S >= threshold - 1e-6)
        if R.tobytes() not in seen:
            seen.add(R.tobytes())
            yield R


def rounded(problem: Problem, kept: np.ndarray) -> np.ndarray:
    """R (T, T) of the schedule that keeps these values (T, V)."""
    return without_useless(problem.graph, least_runs(problem, kept))


def least_runs(problem: Problem, S: np.ndarray) -> np.ndarray:
    """Phase two: the least R (T, T) with which S (T, V) can be kept.

    R[t, t] = 1; R[t, prod(v)] = 1 where v is kept for stage t+1 but not for t, or an op that runs in stage t reads v,
    which is not kept. What a pinned op makes is kept in any case, and so is what cannot be made again by then, since an
    input of its op is overwritten.
    """
    graph, S = problem.graph, S.copy()
    for k, op in enumerate(graph.ops):
        results = [v for v in op.outputs if op.pinned or v in graph.outputs]
        S[k + 1 :, results] = True
    while True:
        R, is_late = _runs(graph, S), False
        for k, last in problem.limits.last_stage.items():
            late = np.flatnonzero(R[last + 1 :, k])
            if late.size:  # keep the values from the last stage in which they can be made
                S[last + 1 : last + 2 + late[-1], list(graph.ops[k].outputs)] = True
                is_late = True
        if not is_late:
            return R


def _runs(graph: Graph, S: np.ndarray) -> np.ndarray:
    """The least R (T, T) with which S can be kept, limits on ops ignored."""
    T = len(graph.ops)
    R = np.eye(T, dtype=bool)
    for t in range(T):
        for k in reversed(range(t + 1)):
            if t + 1 < T and any(S[t + 1, v] and not S[t, v] for v in graph.ops[k].outputs):
                R[t, k] = True
            if R[t, k]:
                for v in graph.ops[k].inputs:
                    producer = graph.values[v].producer
                    if producer is not None and not S[t, v]:
                        R[t, producer] = True
    return R
