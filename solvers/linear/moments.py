"""A lower bound on the seconds of all schedules, from the memory limit at a few moments of the step.

A moment is the first execution of an op o_i; o_1 < ... < o_m. X[i, v]: value v is at hand at moment i. R[i, k]: op k
runs between moments i-1 and i, the last included. Of the rules of a schedule we keep

    R[i, j] <= X[i-1, v] + R[i, prod(v)]          v an input of op j            (1b)
    X[i, v] <= X[i-1, v] + R[i, prod(v)]                                        (1c)
    R[i, k] = 1 for o_{i-1} < k <= o_i;  R[i, k] = 0 before that, and after it where k is pinned    (8)
    R[i, k] = 0 where what k reads is overwritten by o_{i-1} or an op before it
    Σ_v M_v X[i, v] <= budget - resident - results so far - workspace of o_i    (9), at the moments only
    X[i, v] = 1 for what o_i reads and makes
    Σ_i R[i, k] <= most_k; 0 for X[i-1, v] in (1b, 1c) where o_{i-1} ends the forward     by rules

Where o_i may write over some of its inputs (`checkmate.core.inplace`), X[i, v] of these says that v is at hand after
the moment, all of them count as at hand at it, and OVER[i, v] takes off what writing over v saves:

    OVER[i, v] + X[i, v] <= 1,   Σ_v OVER[i, v] <= 1

Any schedule maps to such R and X at no more cost: the least cost here is a bound for all of them. It has O(T m)
variables, where the exact model has O(T^2). Which moments matters more than how many. A model of few moments lets an op
run once between two of them, whenever it likes, and holds no memory in between; so `moment_bound` starts with two, and
there are two signs that one is missing. Where the plan that the model's answer suggests breaks the budget, the model
holds more than there is room for. And where a plan that fits runs an op twice between two moments, the model pays for
one run only: it cannot prove what the other is for, unless a moment comes between them.

The relaxation of each model is solved first, with more and more cuts (`checkmate.solvers.linear.cuts`), which take over
from model to model: seconds, where a model in integers may take minutes. What it keeps more than half of is the answer
that says which moments are missing. As long as the model in integers is solved soon after that, its answer says it.

What only one op j reads, and nothing else that comes and goes goes into j, need not be kept where j may run instead:
what j makes of it is kept as well in as few bytes. So X[i, v] = 0 for such v, from the first execution of j on.

Where there is a second memory, values leave and come back by links while ops run, which has rows of its own
(`checkmate.solvers.linear.links`). With homes there the model is solved as a linear program only.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.solvers.common.incumbent import Incumbent, Task
from checkmate.solvers.common.schedules import bytes_in_stages, cost_of, fits_budget, on_demand
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.cuts import Path, PathCuts, rounded
from checkmate.solvers.linear.highs import SolveStatus
from checkmate.solvers.linear.links import proven_seconds
from checkmate.solvers.linear.model import NONE, Row
from checkmate.solvers.linear.moment_model import MomentModel, build

log = logging.getLogger("checkmate.solve")
OnRuns = Callable[[np.ndarray], object] | None
RISE = 1e-5  # of a bound: a smaller one is none
EXACT = 1e-6  # a smaller gap than this is none
LAST_MODEL = 0.98  # of the time: later than that no model is begun
FEW = 3  # moments: the default ones
FAR = 0.01  # of the best plan's seconds: a bound that is farther off lacks more than one moment
AT_FIRST, ADDED = 12, 4  # moments at a time then, where the answer breaks the budget: beside two or three, and later
CLEAR = 3e-3  # of the budget: what breaks it by less is a sign only if nothing breaks it by more
WORTH = 0.01  # of the plan's seconds: a moment that has the model pay less is not worth its variables
ALIKE = 0.2  # of how much the best moment breaks the budget, or separates: one that does so by no less is as good
SOON, TIMES = 1.0, 4.0  # a model in integers is solved soon within so many seconds, or times those of its relaxation
NEAR, LONG = 0.02, 0.3  # so near the best plan few moments may close the gap: of the time left, for integers then
COARSE = 0.2  # of the gap to the best plan: what models are solved to that others follow
AT_ONCE = 24  # moments, up to which as many are added as separate repeated runs


@dataclass(frozen=True, eq=False)
class Bound:
    """The bound that some moments prove, and the values that their model keeps."""

    value: float  # seconds that every schedule within the budget takes; infinite if proven that none is
    moments: tuple[int, ...] = ()  # ops, of the last model that had an answer
    kept: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # (m, V) bool, at hand at each moment
    parts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # (m, V) from 0 to 1, of the last relaxation
    R: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # (m + 1, T) bool, runs between moments
    sent: tuple[int, ...] = ()  # values that come back from a second memory in it
    schedule: Schedule | None = None  # of the least cost, where the model's answer fits the budget: it is optimal
    infeasible: bool = False  # proven: no schedule fits the budget
    cut: bool = False  # the last model ran out of time


def moment_bound(
    task: Task,
    incumbent: Incumbent,
    *,
    moments: Sequence[int] | None = None,
    most: int = 40,
    on_runs: OnRuns = None,
    on_bound: Callable[[Bound], object] | None = None,
) -> Bound:
    """The best bound of models with more and more moments.

    Args:
        task: each model is solved to its gap; a larger one leaves time for more moments.
        incumbent: the solver starts from its schedule, where there is one.
        moments: ops to begin with; by default where keeping everything peaks and where most is unavoidable.
        on_runs: called, in another thread, with lifted runs (T, T) of each better answer, which may break the budget.
        on_bound: called with what the model of each set of moments proves and keeps.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> tasks = [Task(problem, budget) for budget in (3, 2)]
    >>> [moment_bound(task, Incumbent(task)).value for task in tasks]
    [4.0, inf]
    """
    problem, clock = task.problem, task.clock
    at = sorted(set(moments)) if moments is not None else default_moments(problem)
    best = Bound(problem.keep_all_cost)
    cuts: list[Row] = []
    soon = True  # the last model in integers was solved soon after its relaxation

    def following_of(bound: Bound) -> list[int]:
        return at if bound.infeasible else next_moments(problem, task.budget, bound, incumbent, most=most)

    while True:
        x, begun = build(problem, task.budget, at), clock.elapsed
        best, cuts = _relax(task, x, at, best, cuts)
        incumbent.prove(best.value)
        following = following_of(best)
        if not (best.infeasible or best.cut or problem.homes) and (soon or following == at):
            # In integers, as far as that is done soon; once no moment is lacking, as exactly as is asked for.
            soonest = SOON if incumbent.gap > NEAR else max(SOON, LONG * clock.left)
            seconds, gap = max(soonest, TIMES * (clock.elapsed - begun)), max(task.gap, COARSE * incumbent.gap)
            solved = _solve(task.within(min(clock.left, seconds), gap=gap), incumbent, x, at, cuts, best, on_runs)
            soon = not solved.cut
            best = solved if soon else replace(best, value=solved.value)
            following = following_of(best)
            if following == at and not best.infeasible and best.schedule is None and (gap > task.gap or not soon):
                best = _solve(task.within(clock.left), incumbent, x, at, [], best, on_runs)
                following = following_of(best)
            incumbent.prove(best.value)
        if on_bound is not None and best.moments:
            on_bound(best)
        in_time = clock.elapsed < LAST_MODEL * clock.seconds
        if best.infeasible or best.schedule is not None or not in_time or following == at:
            return best
        at = following


def _relax(task: Task, x: MomentModel, at: list[int], best: Bound, cuts: list[Row]) -> tuple[Bound, list[Row]]:
    """Solve the relaxation with more and more cuts; give the better bound, its answer, and the cuts that bind.

    Args:
        cuts: those of a model of fewer moments.
    """
    problem, paths = task.problem, PathCuts(x)
    relaxation = highs.Relaxation(x.model, task.threads)
    relaxation.add([row for cut in cuts if isinstance(cut.source, Path) for row in cut.source.rows(x)])
    value, result, risen = best.value, None, 0.0
    while True:
        last = relaxation.solve(task.clock.left)
        if last.outcome is SolveStatus.INFEASIBLE:
            return replace(best, value=float("inf"), infeasible=True), []
        if last.outcome is not SolveStatus.OPTIMAL or last.x is None:
            break
        result, value = last, max(value, proven_seconds(problem, last.bound))
        rows = [*paths.broken(last.x), *(rounded(x.fit, last.x) if problem.host is None else ())]
        log.debug("bound: %.6g s with %d moments, %d cuts broken, %d rows", value, len(at), len(rows), relaxation.rows)
        if not rows or task.clock.is_over:
            break
        if last.bound > risen * (1 + RISE):  # else rows might come and go for ever
            relaxation.drop_slack()
            risen = last.bound
        relaxation.add(rows)
    if result is None or result.x is None:
        return replace(best, value=value, cut=True), []
    log.info("bound: %.6g s by the relaxation of %d moments and %d cuts", value, len(at), relaxation.rows)
    cut = last is not result or task.clock.is_over
    bound = _answer(problem, x, at, result.x, value, cut=cut)
    return replace(bound, parts=x.model.value(result.x, x.X)), relaxation.binding()


def _answer(problem: Problem, x: MomentModel, at: list[int], values: np.ndarray, value: float, *, cut: bool) -> Bound:
    """The bound with what an answer keeps, runs and fetches, rounded."""
    kept, runs = (x.model.value(values, family) > 0.5 for family in (x.X, x.R))
    sent = [] if x.links is None else np.flatnonzero((x.model.value(values, x.links.F) > 0.5).any(axis=0)).tolist()
    sent = [v for v in sent if v not in problem.homes]
    return Bound(value, tuple(at), kept, R=runs, sent=tuple(sent), cut=cut)


def _solve(
    task: Task, incumbent: Incumbent, x: MomentModel, at: list[int], cuts: list[Row], best: Bound, on_runs: OnRuns
) -> Bound:
    """Solve the model in integers, with these cuts; give the better of its bound and the known one, and its answer."""
    problem, budget, R = task.problem, task.budget, incumbent.R
    # Only cuts of paths, whose numbers are whole: with rounded rows a presolve in integers has cut off the optimum.
    if cuts:
        x.model.constrain_rows("cuts", [cut for cut in cuts if cut.source is not None])
    # Start from the columns R of the best schedule; the solver finds X.
    start = None
    if R is not None:
        runs = np.logical_or.reduceat(R, [0, *(o + 1 for o in at if o + 1 < len(R))], axis=0)[: len(x.R)]
        columns = x.R[: len(runs)]
        start = columns[columns != NONE], runs[columns != NONE].astype(np.float64)

    def answer(values: np.ndarray) -> None:
        if on_runs is not None:
            on_runs(lifted_runs(problem, Bound(0.0, tuple(at), x.model.value(values, x.X) > 0.5)))

    result = highs.run(
        x.model,
        gap=task.gap,
        time_limit=task.clock.left,
        threads=task.threads,
        start=start,
        heuristics=R is None,
        on_incumbent=answer,
        on_bound=lambda bound: incumbent.prove(proven_seconds(problem, bound)),
    )
    value = max(best.value, proven_seconds(problem, result.bound))
    log.info("bound: %.6g s with %d moments, %s", value, len(at), result.outcome.value)
    if result.outcome is SolveStatus.INFEASIBLE:
        return replace(best, value=float("inf"), infeasible=True)
    if result.x is None:
        return replace(best, value=value, cut=True)
    new_bound = _answer(problem, x, at, result.x, value, cut=result.outcome is SolveStatus.STOPPED)
    new_bound = replace(new_bound, parts=best.parts if best.moments == tuple(at) else new_bound.kept)
    schedule = Schedule.from_runs(problem.graph, lifted_runs(problem, new_bound))
    proven = fits_budget(problem, budget, schedule.R) and cost_of(problem, schedule.R) <= value * (1 + EXACT)
    return replace(new_bound, schedule=schedule if proven else None)


def lifted_runs(problem: Problem, bound: Bound) -> np.ndarray:
    """R (T, T) bool that keeps at each moment the values that the model keeps, and remakes missing ones on demand.

    Its cost is at most the model's; its peak may exceed the budget between the moments.
    """
    moments = zip(bound.moments, bound.kept, strict=True)
    return on_demand(problem, {t: np.flatnonzero(at).tolist() for t, at in moments})


def next_moments(problem: Problem, budget: int, bound: Bound, incumbent: Incumbent, *, most: int) -> list[int]:
    """Up to ``most`` moments for the next model: those of a bound, and new ones where it seems too weak.

    Far from the best plan several at a time: models of few moments prove little, and take time too. Those of the bound
    alone if its model ran out of time, or nothing is lacking.
    """
    if bound.cut:
        return list(bound.moments)
    several = AT_FIRST if len(bound.moments) <= FEW else ADDED
    if incumbent.cost - bound.value <= FAR * incumbent.cost:
        several = 1
    lifted, room = lifted_runs(problem, bound), most - len(bound.moments)
    new_moments = where_it_breaks(problem, budget, lifted, bound.moments, most=min(several, room))
    if incumbent.R is not None and several > 1:
        moments = [*bound.moments, *new_moments]
        repeated = min(most - len(moments), max(ADDED, AT_ONCE - len(moments)))
        new_moments += where_runs_repeat(problem, incumbent.R, moments, most=max(0, repeated))
    return sorted({*bound.moments, *new_moments})


def default_moments(problem: Problem) -> list[int]:
    """Moments where keep-all peaks, where most bytes are unavoidable, and, for some rules, before the backward."""
    begin = [problem.graph.forward_length - 1] if problem.limits.recomputed else []
    return sorted({int(np.argmax(problem.live_bytes)), int(np.argmax(problem.unavoidable_bytes)), *begin})


def in_windows(problem: Problem, count: int) -> list[int]:
    """The default moments, plus those where most bytes are unavoidable in equal parts of the backward."""
    unavoidable, T = problem.unavoidable_bytes, len(problem.graph.ops)
    begin = problem.graph.forward_length if problem.graph.forward_length < T else 0
    ends = np.linspace(begin, T, count + 1).astype(int).tolist()
    fullest = {a + int(np.argmax(unavoidable[a:b])) for a, b in pairwise(ends) if a < b}
    return sorted(fullest.union(default_moments(problem)))


def where_it_breaks(
    problem: Problem, budget: int, R: np.ndarray, moments: Sequence[int], *, most: int = 1
) -> list[int]:
    """Up to ``most`` stages in which a schedule (T, T) breaks the budget, the worst first.

    One at most in each gap between moments, and there in each of ``most`` equal parts of the step. Those whose own op
    breaks it come first: a moment limits no runs before it. Of stages that are nearly alike in this it is the one where
    most bytes are unavoidable.
    """
    within, own = bytes_in_stages(problem, R)
    within[list(moments)] = own[list(moments)] = 0
    excess = (own if own.max() > budget else within) - budget
    breaking: dict[tuple[int, int], list[int]] = {}  # by how many moments are before it, and by part; the worst first
    for t in np.argsort(-excess, kind="stable").tolist():
        if excess[t] <= (CLEAR * budget if breaking else 0):
            break
        where = bisect.bisect(moments, t), most * t // len(R)
        if where in breaking or len(breaking) < most:
            breaking.setdefault(where, []).append(t)
    alike = ([t for t in stages if excess[t] >= (1 - ALIKE) * excess[stages[0]]] for stages in breaking.values())
    return [max(stages, key=problem.unavoidable_bytes.__getitem__) for stages in alike]


def where_runs_repeat(problem: Problem, R: np.ndarray, moments: Sequence[int], *, most: int) -> list[int]:
    """Up to ``most`` moments that separate repeated runs (T, T) of the same op, the dearest ops first.

    Of moments that are nearly alike in this it is the one where most bytes are unavoidable.
    """
    T, seconds, cost = len(R), problem.seconds, float(R.sum(axis=0) @ problem.seconds)
    at: list[int] = sorted(moments)
    separators: list[int] = []
    gains = np.zeros(T)  # per stage: seconds of the ops that run before and after it within its gap
    for begin, end in pairwise([0, *(o + 1 for o in at), T]):
        gains[begin:end] = _gains(R[begin:end], seconds)
    while len(separators) < most and gains.max() > WORTH * cost:
        best = np.flatnonzero(gains >= (1 - ALIKE) * gains.max())
        t = int(best[np.argmax(problem.unavoidable_bytes[best])])
        i = bisect.bisect(at, t)
        begin, end = at[i - 1] + 1 if i else 0, at[i] + 1 if i < len(at) else T
        for part in (slice(begin, t + 1), slice(t + 1, end)):
            gains[part] = _gains(R[part], seconds)
        at.insert(i, t)
        separators.append(t)
    return separators


def _gains(R: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(n,) seconds of the ops that run both before and after each of n stages (n, T)."""
    before = np.logical_or.accumulate(R, axis=0)
    after = np.logical_or.accumulate(R[::-1], axis=0)[::-1]
    return np.append((before[:-1] & after[1:]) @ seconds, np.zeros(min(1, len(R))))
