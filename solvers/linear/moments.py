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

Where the relaxation of more moments proves less than a model of fewer has proven, ops run in part in several segments.
Then moments stand where most is unavoidable in each of 6 parts of the backward, then of 12, and so on, and rows tie
several segments together. For a span of segments a..b, from moment a-1 to b, let ANY[j] say that op j runs in one:

    R[s, j] <= ANY[j] <= Σ_s R[s, j]               s in a..b
    ANY[j] <= X[a-1, v] + ANY[prod(v)]             v an input of op j, made before the span
    X[b, v] <= X[a-1, v] + ANY[prod(v)]            v made before the span

With them a model proves no less by its relaxation than each of the models whose segments are its spans. Every schedule
obeys them: the first run of j in the span finds v at hand, which either was so at moment a-1 or was made in the span.

What only one op j reads, and nothing else that comes and goes goes into j, need not be kept where j may run instead:
what j makes of it is kept as well in as few bytes. So X[i, v] = 0 for such v, from the first execution of j on.

Where there is a second memory, values leave and come back by links while ops run, which has rows of its own
(`checkmate.solvers.linear.links`). With homes there the model is solved as a linear program only.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from checkmate.core.limits import lives
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.solvers.common.incumbent import Incumbent, Task
from checkmate.solvers.common.schedules import bytes_in_stages, cost_of, fits, on_demand
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import cost_unit, run_at_most, size_unit
from checkmate.solvers.linear.highs import SolveStatus
from checkmate.solvers.linear.links import LinkColumns, add_links, bind_homes, bind_links, proven_seconds, time_segments
from checkmate.solvers.linear.model import NONE, Model, Term

log = logging.getLogger("checkmate.solve")
OnRuns = Callable[[np.ndarray], object] | None
EXACT = 1e-6  # a smaller gap than this is none
LAST_MODEL = 0.98  # of the time: later than that no model is begun
FAR = 0.01  # of the best plan's seconds: a bound that is farther off lacks more than one moment
ADDED = 2  # moments at a time then, where the answer breaks the budget
CLEAR = 3e-3  # of the budget: what breaks it by less is a sign only if nothing breaks it by more
WORTH = 0.01  # of the plan's seconds: a moment that has the model pay less is not worth its variables
LENGTHS = (2, 3, 5)  # of spans, in segments; and those that reach to the end
ALIKE = 1e-6  # of the plan's seconds
TRIAL = 0.1  # of the time left: what a relaxation is tried for
LOOSE = 0.01  # of a bound: what the relaxation of more moments proves less, where rows about spans are worth their time
WINDOWS = 6  # of the backward, at first, where rows about spans are added: a moment in each, and twice as many next
AT_ONCE = 12  # moments, up to which as many are added as repeat runs
SMALL = 2e-3  # of the bytes that keeping everything takes: values that take less together are not looked at
COARSE = 0.2  # of the gap to the best plan: what models are solved to that others follow


@dataclass(frozen=True, eq=False)
class Bound:
    """The bound that some moments prove, and the values that their model keeps."""

    value: float  # seconds that every schedule within the budget takes; infinite if proven that none is
    moments: tuple[int, ...] = ()  # ops, of the last model that had an answer
    kept: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # (m, V) bool, at hand at each moment
    R: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  # (m + 1, T) bool, runs between moments
    sent: tuple[int, ...] = ()  # values that come back from a second memory in it
    schedule: Schedule | None = None  # of the least cost, where the model's answer fits the budget: it is optimal
    infeasible: bool = False  # proven: no schedule fits the budget
    cut: bool = False  # the last model ran out of time


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The model of some moments: columns of R (m + 1, T) and X (m, V), `NONE` where zero."""

    model: Model
    R: np.ndarray
    X: np.ndarray
    carried: np.ndarray  # X as what follows a moment finds it: without what a rule has made again in the backward
    OVER: np.ndarray  # (m, V): the op of moment i writes over value v
    links: LinkColumns | None = None  # where there is a second memory

    def sources(self, s: np.ndarray, v: np.ndarray, made_by: np.ndarray) -> list[Term]:
        """Sources of values in the segments after moments s, in an equation on whose other side those stand."""
        fetched = [] if self.links is None else [(self.links.F[s + 1, v], -1.0)]
        made = np.where(made_by[v] < 0, NONE, self.R[s + 1, made_by[v]])
        return [(self.carried[s, v], -1.0), (made, -1.0), *fetched]


def moment_bound(
    task: Task, incumbent: Incumbent, *, moments: Sequence[int] | None = None, most: int = 40, on_runs: OnRuns = None
) -> Bound:
    """The best bound of models with more and more moments.

    Args:
        task: each model is solved to its gap; a larger one leaves time for more moments.
        incumbent: the solver starts from its schedule, where there is one.
        moments: ops to begin with; by default where keeping everything peaks and where most is unavoidable.
        on_runs: called, in another thread, with lifted runs (T, T) of each better answer, which may break the budget.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> tasks = [Task(problem, budget) for budget in (3, 2)]
    >>> [moment_bound(task, Incumbent(task)).value for task in tasks]
    [4.0, inf]
    """
    problem, clock = task.problem, task.clock
    at = sorted(set(moments)) if moments is not None else default_moments(problem)
    best, finest = Bound(problem.keep_all_cost), False
    loose: bool | None = None  # not known yet
    windows = WINDOWS
    while True:
        if loose is None and best.moments and problem.host is None:
            # Does the relaxation of these moments prove less than fewer moments have proven?
            relaxed = highs.run(
                build(problem, task.budget, at).model, relax=True, time_limit=TRIAL * clock.left, threads=task.threads
            )
            least = relaxed.bound * cost_unit(problem)
            loose = relaxed.outcome is SolveStatus.OPTIMAL and least < best.value * (1 - LOOSE)
            at = in_windows(problem, windows) if loose else at
        coarse = 0.0 if finest or len(at) >= most or incumbent.R is None else COARSE * incumbent.gap
        gap = max(task.gap, coarse)
        best = _round(replace(task, gap=gap), incumbent, at, best, on_runs, spanned=bool(loose))
        incumbent.prove(best.value)
        in_time = clock.elapsed < LAST_MODEL * clock.seconds
        if best.infeasible or best.schedule is not None or not in_time or best.moments != tuple(at):
            return best
        if loose:
            windows *= 2
            at = in_windows(problem, windows)
        else:
            at = next_moments(problem, task.budget, best, incumbent, most=most)
        if at == list(best.moments):
            if gap == task.gap:
                return best
            finest = True  # once more with all rows


def _round(task: Task, incumbent: Incumbent, at: list[int], best: Bound, on_runs: OnRuns, *, spanned: bool) -> Bound:
    """Solve the model of these moments; give the better of its bound and the known one, and its answer if any."""
    problem, budget, R = task.problem, task.budget, incumbent.R
    x = build(problem, budget, at, spanned=spanned)
    # Start from the columns R of the best schedule; the solver finds X.
    start = None
    if R is not None and not problem.homes:
        runs = np.logical_or.reduceat(R, [0, *(o + 1 for o in at if o + 1 < len(R))], axis=0)[: len(x.R)]
        columns = x.R[: len(runs)]
        start = columns[columns != NONE], runs[columns != NONE].astype(np.float64)

    def answer(values: np.ndarray) -> None:
        if on_runs is not None:
            on_runs(lifted_runs(problem, Bound(0.0, tuple(at), x.model.value(values, x.X) > 0.5)))

    result = highs.run(
        x.model,
        relax=bool(problem.homes),
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
        return replace(best, value=value)
    kept, runs = (x.model.value(result.x, family) > 0.5 for family in (x.X, x.R))
    sent = [] if x.links is None else np.flatnonzero((x.model.value(result.x, x.links.F) > 0.5).any(axis=0)).tolist()
    sent = [v for v in sent if v not in problem.homes]
    found = Bound(value, tuple(at), kept, runs, tuple(sent), cut=result.outcome is SolveStatus.STOPPED)
    schedule = Schedule.from_runs(problem.graph, lifted_runs(problem, found))
    proven = (
        not problem.homes and fits(problem, budget, schedule.R) and cost_of(problem, schedule.R) <= value * (1 + EXACT)
    )
    return replace(found, schedule=schedule if proven else None)


def build(
    problem: Problem, budget: int, moments: Sequence[int], *, spanned: bool = False, choose: bool = False
) -> Relaxed:
    """The model of these moments, ascending; without a second memory also with rows for spans of segments.

    Args:
        choose: whether a copy of each home is kept from call to call is for the model to say.
    """
    graph, model = problem.graph, Model()
    T, V, m = len(graph.ops), len(graph.values), len(moments)
    # Values that are at hand for good are no columns: inputs, results, with a second memory the small ones.
    made_by = np.array([-1 if value.producer is None else value.producer for value in graph.values])
    homes = np.isin(np.arange(V), [*problem.homes])
    held = np.isin(np.arange(V), graph.outputs) | ((made_by < 0) & ~homes)  # always at hand once made
    host = problem.host
    if host is not None:
        order = np.argsort(problem.sizes, kind="stable")
        held[order[np.cumsum(problem.sizes[order]) <= SMALL * (problem.keep_all_peak - problem.resident)]] = True
    useful, read = map(np.array, lives(graph, problem.limits.last_stage))
    # R: each new op of a segment runs in it; one of before may run again while anybody reads it.
    begins = np.array([0, *(o + 1 for o in moments)])[:, None]  # first new op of each segment
    ends = np.array([*moments, T - 1])[:, None]
    k = np.arange(T)
    first = (begins <= k) & (k <= ends)
    pinned = np.array([op.pinned is not None for op in graph.ops])
    R_there = first | ((k < begins) & (useful >= begins) & ~pinned)
    # X: what a moment may carry, that is made by then and read at it or later.
    own, over = np.zeros((2, m, V), dtype=bool)
    for i, o in enumerate(moments):
        own[i, [*graph.ops[o].inputs, *graph.ops[o].outputs]] = True
        over[i, [v for v, _ in problem.savings[o]]] = True
    stays = np.isin(np.arange(V), [*problem.kept, *problem.homes.intersection(graph.overwritten_by)]) | (homes & choose)
    X_there = ~held & (made_by <= ends[:-1]) & ((read > ends[:-1]) | own | stays)
    if not problem.limits.last_stage and host is None:  # not tried beside ops that overwrite something
        X_there &= own | ~_better_as_made_of(problem, held, moments)
    # The columns.
    price = problem.seconds / cost_unit(problem) if host is None else 0.0
    R = model.variables(R_there, lower=first, cost=price, integer=True)
    X = model.variables(X_there, lower=own & ~over, integer=True)  # the least X is integral: for cover cuts of (9)
    carried = X.copy()
    carried[np.ix_([o == graph.forward_length - 1 for o in moments], [*problem.limits.recomputed])] = NONE
    links = None if host is None else add_links(model, problem, ends[:, 0], made_by, held, choose=choose)
    x = Relaxed(model, R, X, carried, model.variables(over), links)
    # R[i, j] <= X[i-1, v] + R[i, prod(v)]      v an input of op j, made before segment i
    reads = [(j, v) for j, op in enumerate(graph.ops) for v in op.inputs if not held[v]]
    readers, of = np.array(reads, dtype=np.int64).reshape(-1, 2).T
    s, e = np.nonzero((R[1:, readers] != NONE) & (made_by[of] < begins[1:]))
    model.constrain("depend", [(R[s + 1, readers[e]], 1.0), *x.sources(s, of[e], made_by)], upper=0.0)
    # X[i, v] <= X[i-1, v] + R[i, prod(v)]      v made before segment i
    s, v = np.nonzero((X[1:] != NONE) & (made_by < begins[1:-1]))
    model.constrain("keep", [(X[s + 1, v], 1.0), *x.sources(s, v, made_by)], upper=0.0)
    _fit(x, problem, budget, moments, made_by)
    run_at_most(model, R, problem)
    if spanned and host is None:
        _bind_spans(x, begins[:, 0], ends[:, 0], made_by, readers, of)
    if host is not None and links is not None:
        bind_links(model, links, R, x.carried, problem, host, made_by)
        time_segments(model, links, R, problem, host, held if choose else None)
    if links is not None and problem.homes:
        e = np.flatnonzero((R[0, readers] != NONE) & homes[of])
        bind_homes(model, links, R, X, problem, budget, ends[:, 0], readers[e], of[e])
    return x


def _better_as_made_of(problem: Problem, held: np.ndarray, moments: Sequence[int]) -> np.ndarray:
    """(m, V) bool: keeping the results of a value is as good at this moment as keeping the value itself.

    Whoever keeps it until op j reads it can run j before the moment and keep what j makes, in as few bytes; j runs no
    more often, and needs nothing else that could be lacking.
    """
    graph, at = problem.graph, np.array(moments, dtype=np.int64)
    better = np.zeros((len(at), len(graph.values)), dtype=bool)
    written = [{v for v, _ in problem.savings[o]} for o in moments]
    for v, users in enumerate(graph.users):
        if held[v] or len(users) != 1 or graph.ops[users[0]].pinned is not None:
            continue
        (j,) = users
        made = {w for w in graph.ops[j].outputs if not held[w]}
        alone = [u for u in graph.ops[j].inputs if not held[u]] == [v]
        if alone and problem.sizes[list(made)].sum() <= problem.sizes[v] and not problem.limits.recomputed & {v, *made}:
            better[:, v] = (at >= j) & [not made & over for over in written]
    return better


def _fit(x: Relaxed, problem: Problem, budget: int, moments: Sequence[int], made_by: np.ndarray) -> None:
    """Σ_v M_v X[i, v] - saved by OVER <= budget - resident - results so far - workspace of o_i      at each moment."""
    room = []
    for o in moments:
        results = [v for v in problem.graph.outputs if 0 <= made_by[v] <= o]
        room.append(budget - problem.resident - int(problem.sizes[results].sum()) - int(problem.workspace[o]))
    i, v = np.nonzero(x.OVER != NONE)  # these are at hand at the moment, whether they are after it or not
    there = np.zeros(x.X.shape, dtype=np.int64)
    there[i, v] = problem.sizes[v]
    at = np.where(there > 0, NONE, x.X)
    saved = np.zeros(x.X.shape)
    saved[i, v] = [dict(problem.savings[moments[row]])[of] for row, of in zip(i.tolist(), v.tolist(), strict=True)]
    unit = size_unit(problem)
    terms = [(at, problem.sizes / unit), (x.OVER, -saved / unit)]
    if x.links is not None:
        terms.append((x.links.L, problem.sizes / unit))
    x.model.constrain("fit", terms, upper=(np.array(room) - there.sum(axis=1)) / unit)
    if len(i):
        x.model.constrain("write over what goes", [(x.OVER[i, v], 1.0), (x.X[i, v], 1.0)], upper=1.0)
        x.model.constrain("write over one", [(x.OVER, 1.0)], upper=1.0)


def spans(count: int) -> Iterator[tuple[int, int]]:
    """First and last segment of each span among this many segments.

    >>> list(spans(3))
    [(0, 1), (0, 2), (1, 2)]
    """
    for a in range(count - 1):
        yield from ((a, b) for b in sorted({*(a + length - 1 for length in LENGTHS), count - 1}) if b < count)


def _bind_spans(
    x: Relaxed, begins: np.ndarray, ends: np.ndarray, made_by: np.ndarray, readers: np.ndarray, read: np.ndarray
) -> None:
    """Add the rows of all spans of segments, from each segment's first and last new op; ``readers`` read ``read``."""
    model, R, X, carried = x.model, x.R, x.X, x.carried
    k = np.arange(R.shape[1])
    for a, b in spans(len(R)):
        runs, begin, name = R[a : b + 1], begins[a], f"in segments {a} to {b}"
        first = (begin <= k) & (k <= ends[b])
        ANY = model.variables((runs != NONE).any(axis=0), lower=first)
        later = np.flatnonzero((ANY != NONE) & ~first)
        model.constrain(f"{name}: one at least", [(ANY[later], 1.0), *((row[later], -1.0) for row in runs)], upper=0.0)
        s, j = np.nonzero((runs != NONE) & ~first)
        model.constrain(f"{name}: any", [(runs[s, j], 1.0), (ANY[j], -1.0)], upper=0.0)
        kept = carried[a - 1] if a else np.full(len(made_by), NONE)
        e = (ANY[readers] != NONE) & (made_by[read] < begin)
        j, v = readers[e], read[e]
        terms = [(ANY[j], 1.0), (kept[v], -1.0), (ANY[made_by[v]], -1.0)]
        model.constrain(f"{name}: depend", terms, upper=0.0)
        if b < len(X):
            (v,) = np.nonzero((X[b] != NONE) & (made_by < begin))
            model.constrain(f"{name}: keep", [(X[b, v], 1.0), (kept[v], -1.0), (ANY[made_by[v]], -1.0)], upper=0.0)


def lifted_runs(problem: Problem, bound: Bound) -> np.ndarray:
    """R (T, T) bool that keeps at each moment the values that the model keeps, and remakes missing ones on demand.

    Its cost is at most the model's; its peak may exceed the budget between the moments.
    """
    kept = zip(bound.moments, bound.kept, strict=True)
    return on_demand(problem, {t: np.flatnonzero(at).tolist() for t, at in kept})


def next_moments(problem: Problem, budget: int, bound: Bound, incumbent: Incumbent, *, most: int) -> list[int]:
    """Up to ``most`` moments for the next model: those of a bound, and new ones where it seems too weak.

    Far from the best plan several at a time: models of few moments prove little, and take time too. Those of the bound
    alone if its model ran out of time, or nothing is lacking.
    """
    if bound.cut:
        return list(bound.moments)
    several = ADDED if incumbent.cost - bound.value > FAR * incumbent.cost else 1
    lifted, room = lifted_runs(problem, bound), most - len(bound.moments)
    found = where_it_breaks(problem, budget, lifted, bound.moments, most=min(several, room))
    if incumbent.R is not None and several > 1:
        known = [*bound.moments, *found]
        repeated = min(most - len(known), max(several, AT_ONCE - len(known)))
        found += where_runs_repeat(problem, incumbent.R, known, most=max(0, repeated))
    return sorted({*bound.moments, *found})


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
    """Stages in which a schedule (T, T) breaks the budget: the worst in each of ``most`` gaps between moments."""
    excess = bytes_in_stages(problem, R)[0] - budget
    excess[list(moments)] = 0
    worst: dict[int, int] = {}  # by how many moments are before it
    for t in np.argsort(-excess, kind="stable").tolist():
        if excess[t] <= (CLEAR * budget if worst else 0) or len(worst) >= most:
            break
        worst.setdefault(bisect.bisect(moments, t), t)
    return list(worst.values())


def where_runs_repeat(problem: Problem, R: np.ndarray, moments: Sequence[int], *, most: int) -> list[int]:
    """Up to ``most`` moments that separate repeated runs (T, T) of the same op, the dearest ops first.

    Of moments that are alike in this it is the one at whose first execution the most is at hand.
    """
    T, seconds, cost = len(R), problem.seconds, float(R.sum(axis=0) @ problem.seconds)
    at: list[int] = sorted(moments)
    found: list[int] = []
    fullest = bytes_in_stages(problem, R)[1]
    gains = np.zeros(T)  # per stage: seconds of the ops that run before and after it within its gap
    for begin, end in pairwise([0, *(o + 1 for o in at), T]):
        gains[begin:end] = _gains(R[begin:end], seconds)
    while len(found) < most and gains.max() > WORTH * cost:
        best = np.flatnonzero(gains >= gains.max() - ALIKE * cost)
        t = int(best[np.argmax(fullest[best])])
        i = bisect.bisect(at, t)
        begin, end = at[i - 1] + 1 if i else 0, at[i] + 1 if i < len(at) else T
        for some in (slice(begin, t + 1), slice(t + 1, end)):
            gains[some] = _gains(R[some], seconds)
        at.insert(i, t)
        found.append(t)
    return found


def _gains(R: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(n,) seconds of the ops that run both before and after each of n stages (n, T)."""
    before = np.logical_or.accumulate(R, axis=0)
    after = np.logical_or.accumulate(R[::-1], axis=0)[::-1]
    return np.append((before[:-1] & after[1:]) @ seconds, np.zeros(min(1, len(R))))
