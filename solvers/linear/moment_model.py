"""The model of some moments: what a schedule runs between them, and what is at hand at them.

Its equations are in `checkmate.solvers.linear.moments`, those of links to a second memory in
`checkmate.solvers.linear.links`, and rows that its relaxation lacks in `checkmate.solvers.linear.cuts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from checkmate.core.limits import lives
from checkmate.core.problem import Problem
from checkmate.solvers.linear.equations import cost_unit, run_at_most, size_unit
from checkmate.solvers.linear.links import LinkColumns, add_links, bind_homes, bind_links, time_segments
from checkmate.solvers.linear.model import NONE, Model, Term

SMALL = 2e-3  # of the bytes that keeping everything takes: values that take less together are not looked at


@dataclass(frozen=True, eq=False)
class MomentModel:
    """The model of m moments; columns are `NONE` where the variable is zero."""

    model: Model
    begins: np.ndarray  # (m + 1,) the first new op of each segment
    made_by: np.ndarray  # (V,) the op that makes each value, -1: none
    inputs: list[list[int]]  # per op, the values it reads that come and go
    R: np.ndarray  # (m + 1, T) columns: runs between moments
    X: np.ndarray  # (m, V) columns: at hand at moments
    carried: np.ndarray  # X as what follows a moment finds it: without what a rule has made again in the backward
    OVER: np.ndarray  # (m, V): the op of moment i writes over value v
    links: LinkColumns | None = None  # where there is a second memory
    fit: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)  # per moment: columns, bytes, room

    def sources(self, s: np.ndarray, v: np.ndarray) -> list[Term]:
        """Sources of values in the segments after moments s, in an equation on whose other side those stand."""
        fetched = [] if self.links is None else [(self.links.F[s + 1, v], -1.0)]
        runs = np.where(self.made_by[v] < 0, NONE, self.R[s + 1, self.made_by[v]])
        return [(self.carried[s, v], -1.0), (runs, -1.0), *fetched]


def build(problem: Problem, budget: int, moments: Sequence[int], *, choose: bool = False) -> MomentModel:
    """The model of these moments, ascending.

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
    price = problem.seconds / cost_unit(problem) if host is None else 0.0
    R = model.variables(R_there, lower=first, cost=price, integer=True)
    X = model.variables(X_there, lower=own & ~over, integer=True)  # the least X is integral: for cover cuts of (9)
    carried = X.copy()
    carried[np.ix_([o == graph.forward_length - 1 for o in moments], [*problem.limits.recomputed])] = NONE
    links = None if host is None else add_links(model, problem, ends[:, 0], made_by, held, choose=choose)
    inputs = [[v for v in op.inputs if not held[v]] for op in graph.ops]
    x = MomentModel(model, begins[:, 0], made_by, inputs, R, X, carried, model.variables(over), links)
    # R[i, j] <= X[i-1, v] + R[i, prod(v)]      v an input of op j, made before segment i
    reads = [(j, v) for j, values in enumerate(inputs) for v in values]
    readers, operands = np.array(reads, dtype=np.int64).reshape(-1, 2).T
    s, e = np.nonzero((R[1:, readers] != NONE) & (made_by[operands] < begins[1:]))
    model.constrain("depend", [(R[s + 1, readers[e]], 1.0), *x.sources(s, operands[e])], upper=0.0)
    # X[i, v] <= X[i-1, v] + R[i, prod(v)]      v made before segment i
    s, v = np.nonzero((X[1:] != NONE) & (made_by < begins[1:-1]))
    model.constrain("keep", [(X[s + 1, v], 1.0), *x.sources(s, v)], upper=0.0)
    _fit(x, problem, budget, moments)
    run_at_most(model, R, problem)
    if host is not None and links is not None:
        bind_links(model, links, R, x.carried, problem, host, made_by)
        time_segments(model, links, R, problem, host, held if choose else None)
    if links is not None and problem.homes:
        e = np.flatnonzero((R[0, readers] != NONE) & homes[operands])
        bind_homes(model, links, R, X, problem, budget, ends[:, 0], readers[e], operands[e])
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
        outs = {w for w in graph.ops[j].outputs if not held[w]}
        alone = [u for u in graph.ops[j].inputs if not held[u]] == [v]
        if alone and problem.sizes[list(outs)].sum() <= problem.sizes[v] and not problem.limits.recomputed & {v, *outs}:
            better[:, v] = (at >= j) & [not outs & over for over in written]
    return better


def _fit(x: MomentModel, problem: Problem, budget: int, moments: Sequence[int]) -> None:
    """Σ_v M_v X[i, v] - saved by OVER <= budget - resident - results so far - workspace of o_i      at each moment."""
    room = []
    for o in moments:
        results = [v for v in problem.graph.outputs if 0 <= x.made_by[v] <= o]
        room.append(budget - problem.resident - int(problem.sizes[results].sum()) - int(problem.workspace[o]))
    i, v = np.nonzero(x.OVER != NONE)  # these are at hand at the moment, whether they are after it or not
    fixed = np.zeros(x.X.shape, dtype=np.int64)
    fixed[i, v] = problem.sizes[v]
    at = np.where(fixed > 0, NONE, x.X)
    saved = np.zeros(x.X.shape)
    saved[i, v] = [dict(problem.savings[moments[row]])[w] for row, w in zip(i.tolist(), v.tolist(), strict=True)]
    unit = size_unit(problem)
    terms = [(at, problem.sizes / unit), (x.OVER, -saved / unit)]
    if x.links is not None:
        terms.append((x.links.L, problem.sizes / unit))
    free = np.array(room, dtype=np.int64) - fixed.sum(axis=1)
    x.model.constrain("fit", terms, upper=free / unit)
    for at_i, over, saves, most in zip(at, x.OVER, saved, free.tolist(), strict=True):
        columns, sizes = np.concatenate([at_i, over]), np.concatenate([problem.sizes, -saves.astype(np.int64)])
        x.fit.append((columns[columns != NONE], sizes[columns != NONE], most))
    if len(i):
        x.model.constrain("write over what goes", [(x.OVER[i, v], 1.0), (x.X[i, v], 1.0)], upper=1.0)
        x.model.constrain("write over one", [(x.OVER, 1.0)], upper=1.0)
