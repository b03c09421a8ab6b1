"""Large neighbourhood search: the runs near a plan's are decided all at once by an exact model.

The plans that are looked at run, in each stage, some of what the known plan runs there, and some of the ops that those
read from: one level more of what could be made again, or a few. Which of these places are best is an integer program,
much smaller than the exact model of all places (`checkmate.solvers.linear.equations`), and mostly still too large. So
its linear relaxation is solved first, within the budget and within a little less, and only what one of the answers runs
in part is free then, with what the plan runs. That leaves a hundredth of the places, and nearly always the good ones.
The best plan of these is the next to look around.

Places p stand in the order in which they run. R[p] is 1 where the op of place p runs; a touch of value v is a place
whose op makes or reads it. KEEP[v, p] is 1 where v stays from the touch p to the next touch of v, q:

    R[q] <= KEEP[v, p]                            the op of q reads v
    KEEP[v, q] <= KEEP[v, p] + R[q]               without R[q] where the op of q reads v
    R[q] + KEEP[v, p] <= 1                        the op of q makes v: what is made again was not kept
    Σ_v M_v KEEP[v, p] + Σ_{v made at q} M_v R[q] + W_q R[q] <= budget - resident - results so far
                                                  at each place q, of all v with p < q <= the next touch of v

What stays all through stage t is in a column THROUGH[t], told from THROUGH[t-1] by the KEEP that begin and end between:
so rows are short. An op that may write over v (`checkmate.core.inplace`) has OVER[v, q] <= 1 - KEEP[v, q], of all v
together at most R[q], which take off what that saves.

So a value has variables for its touches, and not for all stages as in the exact model:
these are the retention intervals of Bartan et al., "Moccasin: Efficient Tensor Rematerialization for Neural Networks",
2023, as binaries. To free what a relaxation and the best plan do not agree on is the neighbourhood of Danna, Rothberg
and Le Pape, "Exploring Relaxation Induced Neighborhoods to Improve MIP Solutions", 2005.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Task
from checkmate.solvers.common.schedules import cost_of, fits_budget, without_useless
from checkmate.solvers.linear import equations, highs
from checkmate.solvers.linear.highs import SolveStatus
from checkmate.solvers.linear.model import NONE, Model

ROOMS = (1.0, 0.96)  # of the way from what is unavoidable to the budget: what relaxations are solved within
PART = 0.01  # of a run: less of it in a relaxation is none
LEVELS = 3  # at most: of inputs of inputs of what runs
FINE = 3e-4  # of the cost: what a neighbourhood is solved to
WORTH = 1e-4  # of the cost: a smaller gain is none
PATIENCE, MORE = 2.0, 2  # seconds for a neighbourhood at first, and times as many where that gains but is too little


def search_around(task: Task, R: np.ndarray) -> np.ndarray:
    """A schedule (T, T) within the budget, no dearer than R, which is within the budget too.

    >>> from checkmate.core.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> search_around(Task(problem, 3), np.tril(np.ones((4, 4), dtype=bool))).sum(axis=0)
    array([1, 1, 1, 1])
    """
    levels, patience = 1, PATIENCE
    while not task.clock.is_over:
        before = cost_of(task.problem, R)
        R, solved = _best_around(task, R, levels, patience)
        better = cost_of(task.problem, R) < before * (1 - WORTH)
        if better and not solved:
            patience *= MORE
        elif not better:
            if not solved or levels == LEVELS:
                break
            levels += 1
    return R


def _best_around(task: Task, R: np.ndarray, levels: int, patience: float) -> tuple[np.ndarray, bool]:
    """The best schedule of relaxations' neighbourhoods of R, or R; and whether all were solved."""
    problem, budget, clock = task.problem, task.budget, task.clock
    around, free = places_around(problem, R, levels), R.copy()
    least = int(problem.unavoidable_bytes.max())
    for room in ROOMS:
        near = build(problem, least + int(room * (budget - least)), R, around)
        relaxed = highs.run(near.model, relax=True, time_limit=clock.left, threads=task.threads)
        if relaxed.x is None:
            break
        free |= near.runs(relaxed.x, PART)
    if clock.is_over:
        return R, False
    near = build(problem, budget, R, free)
    limit = min(patience, clock.left)
    answer = highs.run(near.model, gap=FINE, time_limit=limit, threads=task.threads, start=near.start(R))
    solved = answer.outcome is not SolveStatus.STOPPED
    if answer.x is None:
        return R, solved
    schedule = without_useless(problem.graph, near.runs(answer.x))
    better = cost_of(problem, schedule) < cost_of(problem, R)
    return (schedule if better and fits_budget(problem, budget, schedule) else R), solved


def places_around(problem: Problem, R: np.ndarray, levels: int) -> np.ndarray:
    """(T, T) bool: the runs of R, the makers of their inputs in the same stage, and so on for ``levels`` levels.

    >>> chain = Problem.from_dag([[], [0], [1], [2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> places_around(chain, np.eye(4, dtype=bool), 1).sum(), places_around(chain, np.eye(4, dtype=bool), 2).sum()
    (np.int64(7), np.int64(9))
    """
    graph, T = problem.graph, len(R)
    last = [problem.limits.last_stage.get(k, T) if op.pinned is None else -1 for k, op in enumerate(graph.ops)]
    around, border = R.copy(), {(t, k) for t, k in np.argwhere(R).tolist()}
    for _ in range(levels):
        border = {(t, d) for t, k in border for d in graph.deps[k] if t <= last[d] and not around[t, d]}
        for t, d in border:
            around[t, d] = True
    return around


@dataclass(frozen=True, eq=False)
class Near:
    """The model of a neighbourhood: places fixed as in R, and free ones."""

    model: Model
    run: np.ndarray  # (T, T) columns R, `NONE` where there is no place

    def start(self, R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The columns of a known schedule; the solver completes the rest."""
        places = self.run != NONE
        return self.run[places], R[places].astype(np.float64)

    def runs(self, x: np.ndarray, part: float = 0.5) -> np.ndarray:
        """(T, T) bool: the ops that run by more than this share in an answer."""
        return self.model.value(x, self.run) > part


def build(problem: Problem, budget: int, R: np.ndarray, free: np.ndarray) -> Near:
    """The model in which places ``free`` (T, T) are on or off and all others are as in R (T, T), which fits the budget.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> R = np.eye(4, dtype=bool)
    >>> near = build(chain, 3, R, places_around(chain, R, 1))
    >>> near.runs(highs.run(near.model).x).sum()
    np.int64(4)
    """
    free = free & ~np.eye(len(R), dtype=bool)
    stage, op = np.nonzero(R | free)
    model, tables = Model(), Tables.of(problem)
    cost, unit = problem.seconds / equations.cost_unit(problem), equations.size_unit(problem)
    columns = model.variables(R | free, lower=~free, cost=cost, integer=True)
    open_ = free[stage, op]
    line = _Line(tables, stage, op, open_)
    for v, touches in enumerate(tables.touches(op.tolist())):
        if tables.producer[v] < 0 or not touches:
            continue
        if tables.result[v]:
            line.hold(v, touches)
        elif open_[[p for p, _ in touches]].any():
            line.keep(v, touches)
        else:
            line.stay(v, touches)
    keeps = model.variables((len(line.upper),), upper=np.array(line.upper), name="KEEP")
    assert not len(keeps) or keeps[0] == len(line.ops)
    run, keep = _columns(line.depend, 2)
    model.constrain("depend", [(run, 1.0), (keep, -1.0)], upper=0.0)
    keep, before, makes = _columns(line.kept, 3)
    model.constrain("keep", [(keep, 1.0), (before, -1.0), (makes, -1.0)], upper=0.0)
    run, before = _columns(line.once, 2)
    model.constrain("keep one copy", [(run, 1.0), (before, 1.0)], upper=1.0)
    written, keep, saved = _columns(line.over, 3)
    OVER = model.variables((len(written),), name="OVER")
    model.constrain("write over what goes", [(OVER, 1.0), (keep, 1.0)], upper=1.0)
    runs, row = np.unique(written, return_inverse=True)
    terms = [(row, OVER, 1.0), (np.arange(len(runs)), runs, -1.0)]
    model.constrain_sparse("write over one", len(runs), terms, upper=0.0)
    first, after, column, size = _columns(line.through, 4)
    stages = np.arange(len(line.begins) - 1)
    through = model.variables(stages.shape, upper=np.inf, name="THROUGH")
    from_here, until_here = (first, column, size / unit), (after, column, -size / unit)
    terms = [(stages, through, -1.0), (stages[1:], through[:-1], 1.0), from_here, until_here]
    model.constrain_sparse("through a stage", len(stages), terms, lower=0.0, upper=0.0)
    place, column, size = _columns(line.at, 3)
    room = budget - tables.resident - line.fixed_at - line.fixed_through[stage]
    through_stage = np.arange(len(room)), through[stage], 1.0
    terms = [(place, column, size / unit), (written, OVER, -saved / unit), through_stage]
    model.constrain_sparse("fit", len(room), terms, upper=room / unit)
    equations.run_at_most(model, columns, problem)
    return Near(model, columns)


@dataclass
class _Line:
    """The places in execution order, with the bytes at each, and the model's rows; R[p] is column p."""

    tables: Tables
    stage: np.ndarray  # (P,)
    op: np.ndarray  # (P,)
    open: np.ndarray  # (P,) bool
    upper: list[float] = field(default_factory=list)  # of the columns KEEP, which come after those of R
    depend: list[tuple[int, int]] = field(default_factory=list)  # a run, and the KEEP it needs
    kept: list[tuple[int, int, int]] = field(default_factory=list)  # a KEEP, the one before, and the run that makes it
    once: list[tuple[int, int]] = field(default_factory=list)  # a run that makes a value, and the KEEP before it
    over: list[tuple[int, int, int]] = field(default_factory=list)  # a place, the KEEP after it, and bytes saved
    at: list[tuple[int, int, int]] = field(default_factory=list)  # place, column and bytes
    through: list[tuple[int, int, int, int]] = field(default_factory=list)  # first stage, the one after, column, bytes

    def __post_init__(self) -> None:
        T = len(self.tables.inputs)
        self.begins = np.searchsorted(self.stage, np.arange(T + 1)).tolist()  # first place of each stage
        self.stages, self.ops = self.stage.tolist(), self.op.tolist()
        workspace = np.array(self.tables.workspace, dtype=np.int64)[self.op]
        self.fixed_at = np.where(self.open, 0, workspace)  # (P,) bytes at a place, whatever the columns are
        self.fixed_through = np.zeros(T + 1, dtype=np.int64)  # (T + 1,) and all through a stage
        self.at += [(p, p, int(workspace[p])) for p in np.flatnonzero(self.open & (workspace > 0)).tolist()]
        self.forward_ends = self.begins[self.tables.boundary] - 1 if self.tables.boundary else -1

    def hold(self, v: int, touches: list[tuple[int, bool]]) -> None:
        """Hold a result from its first run on, and a second copy while it is remade."""
        first, *again = [p for p, makes in touches if makes]
        self._cover(NONE, self.tables.size[v], first - 1, len(self.ops) - 1)
        for p in again:
            self._count(p, p if self.open[p] else NONE, self.tables.size[v])

    def stay(self, v: int, touches: list[tuple[int, bool]]) -> None:
        """Keep a value that no free place touches in memory as it was."""
        begins = [i for i, (_, makes) in enumerate(touches) if makes]
        for i, end in zip(begins, [*begins[1:], len(touches)], strict=True):
            first, last = touches[i][0], touches[end - 1][0]
            self._cover(NONE, self.tables.size[v], first - 1, last)
            if last > first:
                self._write_over(v, last, NONE)

    def keep(self, v: int, touches: list[tuple[int, bool]]) -> None:
        """Keep a value that free places touch from touch to touch, or not."""
        before = NONE
        following: list[tuple[int, bool] | None] = [*touches[1:], None]
        for (p, makes), after in zip(touches, following, strict=True):
            column = NONE if after is None else len(self.ops) + len(self.upper)
            if after is not None:
                gone = v in self.tables.recomputed and p <= self.forward_ends < after[0]
                made_anyway = after[1] and not self.open[after[0]]
                self.upper.append(0.0 if gone or made_anyway else 1.0)
                self.kept.append((column, before, p if makes else NONE))
                self._cover(column, self.tables.size[v], p, after[0])
            if makes:
                self._count(p, p if self.open[p] else NONE, self.tables.size[v])
                if self.open[p] and before != NONE:
                    self.once.append((p, before))
            else:
                self.depend.append((p, before))
                self._write_over(v, p, column)
            before = column

    def _write_over(self, v: int, p: int, column: int) -> None:
        """Let the op at p write over v, if v does not stay."""
        saved = dict(self.tables.savings[self.ops[p]]).get(v)
        if saved:
            self.over.append((p, column, saved))

    def _count(self, p: int, column: int, size: int) -> None:
        if column == NONE:
            self.fixed_at[p] += size
        else:
            self.at.append((p, column, size))

    def _cover(self, column: int, size: int, after: int, last: int) -> None:
        """Add bytes at all places behind ``after``, up to ``last``."""
        if not size or last <= after:
            return
        first, final = self.stages[after + 1], self.stages[last]
        first += self.begins[first] <= after  # the first stage of which all places are covered
        if first >= final:
            first = final = self.stages[last]
        for p in (*range(after + 1, self.begins[first]), *range(max(after + 1, self.begins[final]), last + 1)):
            self._count(p, column, size)
        if column == NONE:
            self.fixed_through[first:final] += size
        elif first < final:
            self.through.append((first, final, column, size))


def _columns(entries: Sequence[tuple[int, ...]], count: int) -> np.ndarray:
    """(count, n) int64: tuples as columns."""
    return np.array(entries, dtype=np.int64).reshape(-1, count).T
