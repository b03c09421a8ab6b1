"""The exact model of Checkmate: which ops run and which values stay, as a mixed-integer linear program.

Letters and equation numbers are those of Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", MLSys 2020: stage t ends with the first execution of op t; R[t, k] op k runs in stage t, S[t, v]
value v is at hand when stage t begins, FREE[t, v, k] v is let go after op k, U[t, k] bytes at hand while op k runs.

Two forms with the same integer optima:

``"paper"``
    FREE is a product of binaries, made linear by rows with a large coefficient (7b, 7c).
``"strengthened"``
    What is at hand after op k in stage t, S[t, v] + R[t, prod(v)] - Σ_{i <= k} FREE[t, v, i], is at least R[t, j] for
    each later user j of v, and at least S[t+1, v]. These rows imply (1b), (1c) and, where S is as small as R allows,
    FREE[t, v, k] <= R[t, k] and S[t, v] + R[t, prod(v)] <= 1. The linear relaxation is at least as tight as that of
    the paper, and only R need be integer: for binary R the least S and the earliest FREE are integral by themselves.
    S is declared integer all the same, for the cover inequalities of `fit_first_runs`: a training step of 80 ops at
    0.7 of its peak is proven optimal in 10 to 30 s, from a good start in 5 s; without either of the two not in 60 s.

We differ from the paper in that values, not ops, are kept and freed, in that a result of the step is at hand from its
first execution to the end, and in that an op has a workspace. A value that is a result or that nobody reads has no
variables: its (second) copy counts while its op runs, as workspace does.

An op may have ways that write over an input v and save so many bytes (`checkmate.core.inplace`): OVER[t, v, k] is 1
where op k writes over v in stage t. It need not be integer, since where R and FREE are, the best is to write over the
one value that goes and saves the most. Where no op has a way, there are none of its columns and rows.

Paper: https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Touches
from checkmate.solvers.linear.model import NONE, Entry, Model, after, pairs

FORMULATIONS = ("strengthened", "paper")
LARGEST = 1e9  # of a coefficient, in units of the mean: HiGHS takes no model with one above 1e15


@dataclass(frozen=True, eq=False)
class Variables:
    """Columns of the model, `NONE` where the variable is known to be zero."""

    R: np.ndarray  # (T, T), op k runs in stage t
    S: np.ndarray  # (T, V), value v is at hand when stage t begins; none for results, which always are
    FREE: np.ndarray  # (T, E), touch e is the last in stage t of a value that is not kept for the next
    OVER: np.ndarray  # (T, E), the op of touch e writes over its value in stage t
    U: np.ndarray  # (T, T), bytes at hand when op k runs in stage t, less resident, results and workspace
    touches: Touches  # the columns of FREE and OVER


def build(problem: Problem, budget: int, *, formulation: str = "strengthened") -> tuple[Model, Variables]:
    """The model of a problem under a budget in bytes, its costs in units of the mean cost of an op.

    Raises:
        ValueError: if the formulation is unknown.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> model, variables = build(problem, budget=3)
    >>> variables.R.shape, variables.S.shape
    ((4, 4), (4, 4))
    """
    if formulation not in FORMULATIONS:
        raise ValueError(f"Unknown formulation {formulation!r}: it is one of {', '.join(FORMULATIONS)}.")
    model, touches = Model(), Touches.of(problem)
    # Columns, only where a variable can be nonzero.
    R, S, FREE = _where(problem, budget, touches)
    saved = most_saved_bytes(problem) / size_unit(problem)
    paper, cost = formulation == "paper", problem.seconds / cost_unit(problem)
    x = Variables(
        R=model.variables(R, name="R", lower=np.eye(len(R)), cost=cost, integer=True),  # (1a, 8a)
        S=model.variables(S, name="S", integer=True),
        FREE=model.variables(FREE, name="FREE", integer=paper),
        OVER=model.variables(FREE & (touches.saved > 0), name="OVER"),
        U=model.variables(np.tril(np.ones_like(R)), name="U", upper=_capacity(problem, budget)[:, None] + R * saved),
        touches=touches,
    )
    # Rows: the paper's, or stronger ones that imply them.
    if paper:
        depend(model, x)
        keep(model, x)
        free_without_hazard(model, x)
        free_with_no_hazard_only(model, x)
    else:
        depend_until_freed(model, x)
        keep_or_free(model, x, after(x.S))
        fit_first_runs(model, x, problem, budget)
    # The bytes in memory, stage by stage.
    begin_stage(model, x, problem)
    run_and_free(model, x, problem)
    fit(model, x, problem, budget)
    if touches.saved.any():
        write_over(model, x)
        keep_one_copy(model, x)
    run_at_most(model, x.R, problem)
    return model, x


def depend(model: Model, x: Variables) -> None:
    """An op runs only when its inputs are in memory (1b).

    R[t, j] <= R[t, prod(v)] + S[t, v]      every stage t, op j, input v of j
    """
    touch = x.touches
    t, e = np.nonzero((x.R[:, touch.op] != NONE) & touch.reads)
    terms = [(x.R[t, touch.op[e]], 1.0), (x.R[t, touch.made_by[e]], -1.0), (x.S[t, touch.value[e]], -1.0)]
    model.constrain("depend", terms, upper=0.0)


def keep(model: Model, x: Variables) -> None:
    """Only a value in memory can be kept (1c).

    S[t+1, v] <= R[t, prod(v)] + S[t, v]      every stage t, value v
    """
    runs = makers(x.R, x.touches, x.S.shape)
    pairs(model, "keep", after(x.S), [(runs, -1.0), (x.S, -1.0)])


def free_without_hazard(model: Model, x: Variables) -> None:
    """A value is freed if nothing holds it back (7b).

    1 - FREE[t, v, k] <= (1 - R[t, k]) + S[t+1, v] + Σ_{j in users(v), j > k} R[t, j]
    """
    count, free, hazards, _ = _hazards(x)
    model.constrain_sparse("free without hazard", count, [free, *hazards], lower=0.0)


def free_with_no_hazard_only(model: Model, x: Variables) -> None:
    """A value is freed only if the op ran, the value is not kept and no later op of the stage reads it (7c).

    κ (1 - FREE[t, v, k]) >= (1 - R[t, k]) + S[t+1, v] + Σ_{j in users(v), j > k} R[t, j],  κ the number of terms
    """
    count, (rows, columns, _), hazards, terms = _hazards(x)
    model.constrain_sparse("free with no hazard only", count, [(rows, columns, terms), *hazards], upper=terms - 1.0)


def _hazards(x: Variables) -> tuple[int, Entry, list[Entry], np.ndarray]:
    """Terms that hold a value back after op k, less the constant 1, one row per FREE[t, v, k]; and their number."""
    touch = x.touches
    mask = x.FREE != NONE
    t, e = np.nonzero(mask)
    rows = np.full(x.FREE.shape, NONE)
    rows[t, e] = np.arange(len(t))
    kept = after(x.S)[t, touch.value[e]]
    late, early = touch.earlier
    s, pair = np.nonzero(mask[:, early] & (x.R[:, touch.op[late]] != NONE))
    held = rows[s, early[pair]]
    terms = 1.0 + (kept != NONE) + np.bincount(held, minlength=len(t))
    own = np.arange(len(t))
    ran = (own, x.R[t, touch.op[e]], -1.0)
    return len(t), (own, x.FREE[t, e], 1.0), [ran, (own, kept, 1.0), (held, x.R[s, touch.op[late[pair]]], 1.0)], terms


def depend_until_freed(model: Model, x: Variables) -> None:
    """An op runs only when its inputs are in memory and not yet freed; implies (1b) and FREE[t, v, k] <= 1 - R[t, j].

    R[t, j] + Σ_{k < j} FREE[t, v, k] <= R[t, prod(v)] + S[t, v]      every stage t, op j, input v of j
    """
    touch = x.touches
    mask = (x.R[:, touch.op] != NONE) & touch.reads
    t, e = np.nonzero(mask)
    rows = np.full(mask.shape, NONE)
    rows[t, e] = own = np.arange(len(t))
    late, early = touch.earlier
    s, pair = np.nonzero(mask[:, late])
    freed = (rows[s, late[pair]], x.FREE[s, early[pair]], 1.0)
    terms = [
        (own, x.R[t, touch.op[e]], 1.0),
        (own, x.R[t, touch.made_by[e]], -1.0),
        (own, x.S[t, touch.value[e]], -1.0),
        freed,
    ]
    model.constrain_sparse("depend until freed", len(t), terms, upper=0.0)


def keep_or_free(model: Model, x: Variables, kept: np.ndarray) -> None:
    """Every value in memory is kept or freed exactly once; implies (1c) where ``kept`` (T, V) is S[t+1].

    S[t+1, v] + Σ_k FREE[t, v, k] <= R[t, prod(v)] + S[t, v]      every stage t, value v
    """
    t, e = np.nonzero(x.FREE != NONE)
    v, mask = x.touches.value[e], kept != NONE
    mask[t, v] = True
    runs, rows = makers(x.R, x.touches, x.S.shape)[mask], np.full(mask.shape, NONE)
    rows[mask] = own = np.arange(len(runs))
    terms: list[Entry] = [(own, kept[mask], 1.0), (own, runs, -1.0), (own, x.S[mask], -1.0)]
    model.constrain_sparse("keep or free", len(own), [*terms, (rows[t, v], x.FREE[t, e], 1.0)], upper=0.0)


def begin_stage(model: Model, x: Variables, problem: Problem) -> None:
    """A stage begins with the values kept for it (2), and with op 0.

    U[t, 0] = Σ_v M_v S[t, v] + R[t, 0] Σ_{v in out(0)} M_v      beyond what is resident and the results so far
    """
    M, made_bytes = _sizes(problem), _made_bytes(problem, x.touches)
    model.constrain("begin stage", [(x.U[:, :1], 1.0), (x.S, -M), (x.R[:, :1], -made_bytes[0])], lower=0.0, upper=0.0)


def run_and_free(model: Model, x: Variables, problem: Problem) -> None:
    """Subtract the bytes that one op frees, and add the bytes that the next one makes (3, 4).

    U[t, k+1] = U[t, k] - Σ_{v in in(k), out(k)} M_v FREE[t, v, k] + R[t, k+1] Σ_{v in out(k+1)} M_v
    """
    touch, made_bytes = x.touches, _made_bytes(problem, x.touches)
    t, k = np.nonzero(x.U[:, 1:] != NONE)
    rows = np.full(x.U.shape, NONE)
    rows[t, k] = own = np.arange(len(t))
    s, e = np.nonzero((x.FREE != NONE) & (rows[:, touch.op] != NONE))  # nothing follows the last op of a stage
    freed = (rows[s, touch.op[e]], x.FREE[s, e], _sizes(problem)[touch.value[e]])
    terms = [(own, x.U[t, k + 1], 1.0), (own, x.U[t, k], -1.0), (own, x.R[t, k + 1], -made_bytes[k + 1]), freed]
    model.constrain_sparse("run and free", len(t), terms, lower=0.0, upper=0.0)


def without_spare(problem: Problem, budget: int) -> tuple[Problem, int]:
    """Subtract spare bytes from budget and workspaces: the same schedules in smaller numbers, which suit tolerances.

    U is at most the bytes of two copies of all values. What the budget has beyond that, and beyond what is resident and
    the results, only workspaces can fill: it is taken off the budget and off each workspace, down to 0.

    >>> problem = Problem.from_dag([[], [0], [1]], seconds=[1, 1, 1], sizes=[1, 1, 1], workspace=[5, 10**15, 0])
    >>> smaller, budget = without_spare(problem, 10**15 + 2)
    >>> smaller.workspace.tolist(), budget
    ([0, 4, 0], 6)
    """
    spare = budget - problem.resident - int(results_bytes(problem)[-1]) - 2 * int(problem.sizes.sum())
    spare -= spare % _divisor(problem)
    if spare <= 0:
        return problem, budget
    profile = problem.profile
    ways = tuple(replace(way, workspace=max(0, way.workspace - spare)) for way in profile.ways)
    workspace = np.maximum(0, profile.workspace_bytes - spare)
    return replace(problem, profile=replace(profile, workspace_bytes=workspace, ways=ways)), budget - spare


def fit(model: Model, x: Variables, problem: Problem, budget: int) -> None:
    """The budget holds while each op runs (9). Where W_k = 0 and op k has no ways this is the upper bound of U.

    U[t, k] + W_k R[t, k] - Σ_v (M_v + W_k - W_w) OVER[t, v, k] <= budget

    W_k with what op k makes that is a result or that nobody reads; W_w the workspace of the way that writes over v.
    """
    touch, M = x.touches, _sizes(problem)
    outputs = np.array([M[list(op.outputs)].sum() for op in problem.graph.ops])
    W = np.maximum(0.0, outputs - _made_bytes(problem, touch)) + problem.workspace / size_unit(problem)
    mask = (x.R != NONE) & ((W > 0) | (most_saved_bytes(problem) > 0))
    t, k = np.nonzero(mask)
    rows = np.full(x.R.shape, NONE)
    rows[t, k] = own = np.arange(len(t))
    s, e = np.nonzero(x.OVER != NONE)
    saved = (rows[s, touch.op[e]], x.OVER[s, e], -touch.saved[e] / size_unit(problem))
    terms: list[Entry] = [(own, x.U[t, k], 1.0), (own, x.R[t, k], W[k]), saved]
    model.constrain_sparse("fit", len(t), terms, upper=_capacity(problem, budget)[t])


def write_over(model: Model, x: Variables) -> None:
    """An op that runs writes over at most one value, and only over one that is let go after it.

    OVER[t, v, k] <= FREE[t, v, k]      every stage t, op k, input v that a way of k writes over
    Σ_v OVER[t, v, k] <= R[t, k]        every stage t, op k with ways
    """
    t, e = np.nonzero(x.OVER != NONE)
    model.constrain("write over what goes", [(x.OVER[t, e], 1.0), (x.FREE[t, e], -1.0)], upper=0.0)
    runs, row = np.unique(x.R[t, x.touches.op[e]], return_inverse=True)
    terms = [(row, x.OVER[t, e], 1.0), (np.arange(len(runs)), runs, -1.0)]
    model.constrain_sparse("write over one", len(runs), terms, upper=0.0)


def keep_one_copy(model: Model, x: Variables) -> None:
    """Forbid a second copy of a kept value, so that an op writes over the only one.

    S[t, v] + R[t, prod(v)] <= 1      every stage t, value v that a way writes over
    """
    both = makers(x.R, x.touches, x.S.shape)
    both[x.S == NONE] = NONE
    both[:, np.setdiff1d(np.arange(both.shape[1]), x.touches.value[x.touches.saved > 0])] = NONE
    pairs(model, "keep one copy", both, [(x.S, 1.0)], upper=1.0)


def fit_first_runs(model: Model, x: Variables, problem: Problem, budget: int) -> None:
    """The budget holds while each op runs for the first time, stated in S alone; implied by (2)-(9).

    Σ_{v not in in(t), out(t)} M_v S[t+1, v] <= budget - Σ_{v in in(t), out(t)} M_v - W_t      every stage t

    What is kept for stage t+1 is at hand in the last moment of stage t. These are knapsacks of binaries, which (2)-(9)
    are not, so that solvers derive cover inequalities from them: the bounds of the linear program change little, those
    after the cuts a lot. An op with ways may take as much less as it saves at most; one that could write over a single
    value v saves that only where v is not kept, that is, saved · (1 - S[t+1, v]).
    """
    M, graph, unit = _sizes(problem), problem.graph, size_unit(problem)
    own = own_bytes(problem) / unit
    kept = after(x.S)
    written = np.full(len(graph.ops), NONE)  # per stage: the column of the one value that its op could write over
    for k, op in enumerate(graph.ops):
        if len(problem.savings[k]) == 1:
            written[k] = kept[k, problem.savings[k][0][0]]
        kept[k, [*op.inputs, *op.outputs]] = NONE
    saved = most_saved_bytes(problem) / size_unit(problem)
    t = np.flatnonzero((kept != NONE).any(axis=1))
    room = (_capacity(problem, budget) - own + saved)[t]
    model.constrain("fit first runs", [(kept[t], M), (written[t], saved[t])], upper=room)


def run_at_most(model: Model, R: np.ndarray, problem: Problem) -> None:
    """An op runs no more often than its rule allows.

    Σ_t R[t, k] <= most_k      every op k under such a rule
    """
    if max_runs := problem.limits.max_runs:
        model.constrain("run at most", [(R[:, [*max_runs]].T, 1.0)], upper=np.array([*max_runs.values()], float))


def size_unit(problem: Problem) -> float:
    """The model's unit of bytes: the mean size, since solver tolerances suit numbers around one."""
    # More where a workspace would be beyond the largest coefficient.
    return max(float(problem.sizes.mean()), float(problem.workspace.max()) / LARGEST) or 1.0


def cost_unit(problem: Problem) -> float:
    """The model's unit of seconds: the mean cost."""
    return float(problem.seconds.mean()) or 1.0


def _where(problem: Problem, budget: int, touch: Touches) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(T, T), (T, V), (T, E) bool: where R, S and FREE can be one in a schedule without useless runs.

    R[t, k] = 0 where k > t (8c), k is pinned, what k reads is overwritten before stage t, no op that may still run
    reads what k makes, or k does not fit beside the results so far. S[t, v] = 0 where v is not yet made (8b) or no op
    that may still run reads it, and where t is the first of the backward and a rule has v made again there.
    """
    graph, until = problem.graph, problem.limits.last_stage
    T, V = len(graph.ops), len(graph.values)
    stage = np.arange(T)[:, None]
    useful = np.arange(T)  # the last stage in which an op may be of use
    read = np.full(V, -1)  # the last stage in which a value that may be kept is read
    # From the last op to the first: until when a run of each op can be useful.
    for k in reversed(range(T)):
        if not graph.ops[k].pinned:
            latest = max([k, *read[list(graph.ops[k].outputs)]])
            useful[k] = min(latest, until.get(k, latest))
        inputs = list(graph.ops[k].inputs)
        read[inputs] = np.maximum(read[inputs], useful[k])
    # R: where an op is useful and fits beside the results so far.
    room = budget - problem.resident - results_bytes(problem)
    fits = own_bytes(problem) - most_saved_bytes(problem) <= room[:, None]
    R = (stage == np.arange(T)) | ((stage > np.arange(T)) & (stage <= useful) & fits)
    # S: from the stage after the producer to the last read. FREE: where a value can be there and go.
    v, made_by = touch.values()
    S = np.zeros((T, V), dtype=bool)
    S[:, v] = (stage > made_by) & (stage <= read[v])
    if problem.limits.recomputed:
        S[graph.forward_length, [*problem.limits.recomputed]] = False
    FREE = R[:, touch.op] & (problem.sizes[touch.value] > 0) & (S[:, touch.value] | R[:, touch.made_by])
    return R, S, FREE


def makers(R: np.ndarray, touches: Touches, shape: tuple[int, ...]) -> np.ndarray:
    """(T, V): R[t, prod(v)] for the values that may be kept, else `NONE`."""
    v, made_by = touches.values()
    columns = np.full(shape, NONE)
    columns[:, v] = R[:, made_by]
    return columns


def results_bytes(problem: Problem) -> np.ndarray:
    """(T,) int64: bytes of the results of the step that are made before each stage."""
    sizes = np.zeros(len(problem.graph.ops) + 1, dtype=np.int64)
    for v in problem.graph.outputs:
        producer = problem.graph.values[v].producer
        if producer is not None:
            sizes[producer + 1] += problem.sizes[v]
    return sizes.cumsum()[:-1]


def own_bytes(problem: Problem) -> np.ndarray:
    """(T,) int64: bytes that an op needs in memory beside the results so far: inputs, outputs and workspace."""
    results = set(problem.graph.outputs)
    touched = [[*(v for v in op.inputs if v not in results), *op.outputs] for op in problem.graph.ops]
    return np.array([problem.sizes[vs].sum() for vs in touched], dtype=np.int64) + problem.workspace


def most_saved_bytes(problem: Problem) -> np.ndarray:
    """(T,) int64: bytes that the best in-place way of each op saves."""
    return np.array([savings[0][1] if savings else 0 for savings in problem.savings], dtype=np.int64)


def _made_bytes(problem: Problem, touch: Touches) -> np.ndarray:
    """(T,): bytes made by each op that stay in memory until freed, in units of size."""
    mask = touch.op == touch.made_by
    return np.bincount(touch.op[mask], _sizes(problem)[touch.value[mask]], minlength=len(problem.graph.ops))


def _sizes(problem: Problem) -> np.ndarray:
    """(V,): M in units of size."""
    return problem.sizes / size_unit(problem)


def _capacity(problem: Problem, budget: int) -> np.ndarray:
    """(T,): the budget of each stage beyond what is resident and the results so far, in units of size.

    Sums of sizes are multiples of their greatest common divisor, so the budget is rounded down to one.
    """
    step = _divisor(problem)
    room = budget - problem.resident - results_bytes(problem)
    return room // step * step / size_unit(problem)


def _divisor(problem: Problem) -> int:
    """The greatest common divisor of all sizes and workspaces, in bytes."""
    ways = np.array([way.workspace for way in problem.profile.ways], dtype=np.int64)
    return int(np.gcd.reduce(np.concatenate([problem.sizes, problem.workspace, ways]))) or 1
