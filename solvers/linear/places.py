"""The exact model on chosen places: only some ops may run again, and only in stages where that can be of use.

A place is a stage t and an op k that may run in it. Those with k = t always run; the others are candidates. Between two
consecutive places that touch a value, the value is at hand or not, so the whole of S, FREE and U comes down to one
variable for each such gap:

    r[p] <= y[e-1]                         the op at place p reads the value of touch e                     (1b)
    y[e] <= y[e-1] + r[p] [p makes it]     at hand after touch e, until the next touch of the value         (1c)
    L[p] = L[p-1] + Σ_{e at p} M (y[e] - y[e-1])                                                            (2)-(4)
    L[p-1] + r[p] (W + Σ_{v in out} M_v) - Σ_e saved_e over[e] <= budget - resident - results so far        (9)

where over[e] says that the op at place p writes over the value of touch e (`checkmate.core.ways`), which goes with it:

    over[e] <= y[e-1] - y[e],   Σ_{e at p} over[e] <= r[p]

Every r is a schedule (`checkmate.core.schedule.Schedule.from_runs`), with y the least that it needs: with all places
this is the exact model, with fewer a restriction of it. Its answers are plans; its bound holds for the chosen places
alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np

from checkmate.core.problem import Problem
from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.runs import peak_of
from checkmate.solvers.common.task import Task
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import cost_unit, run_at_most, size_unit
from checkmate.solvers.linear.highs import Result
from checkmate.solvers.linear.model import NONE, Model

LEAST_SECONDS = 0.1  # for the model on some places, however little is left


def restricted(
    task: Task,
    incumbent: Incumbent,
    places: np.ndarray,
    *,
    frozen: np.ndarray | None = None,
    target: float | None = None,
) -> Result:
    """The cheapest schedule on these places; it is offered, and what is returned is proven for these places only.

    Args:
        incumbent: its schedule, where there is one, runs on these places only, and is the start.
        places: (P, 2) int, as `choose_places` gives them.
        frozen: (P,) bool, places that stay as in the start.
        target: stop at a schedule that takes at most this many seconds.
    """
    problem, budget, start = task.problem, task.budget, incumbent.R
    by = "restricted" if frozen is None else "windows"
    goal = None if target is None else target / cost_unit(problem)
    excess = 0
    for _ in range(2):  # an answer may break the budget by less than the solver's tolerance: ask for more room
        model, r = build(problem, budget - 2 * excess, places, start=start, frozen=frozen)
        known = None if start is None else (r, start[places[:, 0], places[:, 1]].astype(np.float64))
        left = max(LEAST_SECONDS, task.clock.left)

        def report(x: np.ndarray, model: Model = model, r: np.ndarray = r) -> None:
            with contextlib.suppress(SolverError):  # the answer at the end decides whether the solver is right
                incumbent.offer(_runs(problem, places, model.value(x, r)), by)

        result = highs.run(
            model, time_limit=left, gap=task.gap, threads=task.threads, start=known, target=goal, on_incumbent=report
        )
        if result.x is None:
            break
        R = _runs(problem, places, model.value(result.x, r))
        incumbent.offer(R, by)
        excess = peak_of(problem, R) - budget
        if excess <= 0:
            break
    return replace(result, bound=result.bound * cost_unit(problem))


def _runs(problem: Problem, places: np.ndarray, x: np.ndarray) -> np.ndarray:
    """R, (T, T) bool, of what runs (P,) at these places, nearly 0 or 1."""
    T = len(problem.graph.ops)
    R = np.zeros((T, T), dtype=bool)
    t, k = places[x > 0.5].T
    R[t, k] = True
    return R


@dataclass(frozen=True, eq=False)
class _Touches:
    """Pairs of a value and a place that makes or reads it, those of a value together and in order."""

    value: np.ndarray  # (E,) int
    place: np.ndarray  # (E,) int
    makes: np.ndarray  # (E,) bool
    follows: np.ndarray  # (E,) bool: the touch before is of the same value

    @classmethod
    def of(cls, problem: Problem, places: np.ndarray) -> _Touches:
        """The touches of values that may come and go: made by an op, of some size, no results, and read by some op."""
        graph = problem.graph
        results = set(graph.outputs)
        there = np.array([bool(graph.users[v]) and v not in results for v in range(len(graph.values))])
        there &= (problem.sizes > 0) | np.isin(np.arange(len(graph.values)), [*problem.limits.gone])
        of_op = [[(v, True) for v in op.outputs] + [(v, False) for v in op.inputs] for op in graph.ops]
        found = [(v, p, makes) for p, k in enumerate(places[:, 1].tolist()) for v, makes in of_op[k] if there[v]]
        value, place, makes = np.array(sorted(found), dtype=np.int64).reshape(-1, 3).T
        return cls(value, place, makes.astype(bool), np.concatenate([[False], value[1:] == value[:-1]])[: len(value)])


def build(
    problem: Problem,
    budget: int,
    places: np.ndarray,
    *,
    start: np.ndarray | None = None,
    frozen: np.ndarray | None = None,
) -> tuple[Model, np.ndarray]:
    """The model on these places, and its columns r (P,)."""
    model, e = Model(), _Touches.of(problem, places)
    stage, op = places.T
    lower, upper = (stage == op).astype(float), np.ones(len(places))
    if frozen is not None and start is not None:
        lower[frozen] = upper[frozen] = start[stage, op][frozen]
    r = model.variables(
        (len(places),), lower=lower, upper=upper, cost=problem.seconds[op] / cost_unit(problem), integer=True
    )
    lasts = np.concatenate([~e.follows[1:], [True]])[: len(e.value)]
    y = model.variables(~lasts & ~_kept_against_rules(problem, e, stage))  # at hand after touch e, until the next one
    before = np.where(e.follows, np.concatenate([[NONE], y[:-1]])[: len(y)], NONE)
    reads = np.flatnonzero(~e.makes)
    model.constrain("depend", [(r[e.place[reads]], 1.0), (before[reads], -1.0)], upper=0.0)
    kept = np.flatnonzero((y != NONE) & e.follows)
    made = np.where(e.makes, r[e.place], NONE)
    model.constrain("keep", [(y[kept], 1.0), (before[kept], -1.0), (made[kept], -1.0)], upper=0.0)
    over = _write_over(model, problem, places, e, r, y, before)
    _remember(model, problem, budget, places, e, r, y, before, over)
    if problem.limits.most_runs:
        by_op = np.full((len(problem.graph.ops), len(problem.graph.ops)), NONE)
        by_op[stage, op] = r
        run_at_most(model, by_op, problem)
    return model, r


def _kept_against_rules(problem: Problem, e: _Touches, stage: np.ndarray) -> np.ndarray:
    """(E,) bool: from this touch to the next the backward begins, and a rule has the value made again there."""
    begin, following = problem.graph.forward_length, np.append(stage[e.place][1:], 0)
    return np.isin(e.value, [*problem.limits.gone]) & (stage[e.place] < begin) & (following >= begin)


def _remember(
    model: Model,
    problem: Problem,
    budget: int,
    places: np.ndarray,
    e: _Touches,
    r: np.ndarray,
    y: np.ndarray,
    before: np.ndarray,
    over: tuple[np.ndarray, np.ndarray],
) -> None:
    """The bytes at hand after each place, and the budget while its op runs."""
    unit, graph, P = size_unit(problem), problem.graph, len(places)
    stage, op = places.T
    results = np.zeros(len(graph.ops) + 1)
    for v in graph.outputs:
        producer = graph.values[v].producer
        if producer is not None:
            results[producer + 1] += problem.sizes[v]
    room = (budget - problem.resident - results.cumsum()[stage]) / unit
    L = model.variables((P,), upper=np.maximum(0.0, room))
    M = problem.sizes[e.value] / unit
    own = np.arange(P)
    earlier = np.concatenate([[NONE], L[:-1]])
    changes = [(own, L, 1.0), (own, earlier, -1.0), (e.place, y, -M), (e.place, before, M)]
    model.constrain_sparse("remember", P, changes, lower=0.0, upper=0.0)
    made = np.array([problem.sizes[list(o.outputs)].sum() for o in graph.ops]) + problem.workspace
    columns, saved = over
    there = np.flatnonzero(columns != NONE)
    terms = [(own, earlier, 1.0), (own, r, made[op] / unit), (e.place[there], columns[there], -saved[there] / unit)]
    model.constrain_sparse("fit", P, terms, upper=room)


def _write_over(
    model: Model,
    problem: Problem,
    places: np.ndarray,
    e: _Touches,
    r: np.ndarray,
    y: np.ndarray,
    before: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Columns (E,) of over, and the bytes that each saves; both of touches that write over nothing are none."""
    savings = [dict(of) for of in problem.savings]
    ops = places[e.place, 1].tolist()
    reads = zip(ops, e.value.tolist(), e.makes.tolist(), strict=True)
    saved = np.array([0 if makes else savings[k].get(v, 0) for k, v, makes in reads], dtype=np.int64)
    columns = model.variables((saved > 0) & (before != NONE))
    at = np.flatnonzero(columns != NONE)
    if len(at):
        terms = [(columns[at], 1.0), (before[at], -1.0), (y[at], 1.0)]
        model.constrain("write over what goes", terms, upper=0.0)
        place, of = np.unique(e.place[at], return_inverse=True)
        one = [(of, columns[at], 1.0), (np.arange(len(place)), r[place], -1.0)]
        model.constrain_sparse("write over one", len(place), one, upper=0.0)
    return columns, saved
