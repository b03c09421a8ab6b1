"""The exact model with a second memory: what runs, stays, is sent and fetched in each stage, as an integer program.

R, S, FREE, OVER and U are those of `checkmate.solvers.linear.equations`: stage t ends with the first execution of op t.
Here a stage has two parts. First ops wait for the links (AutoTM's synchronous moves); then ops run, and the links work
beside them. A transfer is asked for at the beginning of either part and waited for at the end of either:

    H[t, v]    a complete copy is in the second memory while the ops of stage t run
    Out[t, v]  v is on its way there while they run: it is at hand, is not made and not written over
    In[t, v]   it is on its way back: its landing buffer counts, and it is not made
    E[t, v]    its copy is complete before they run, and was not before
    F[t, v]    it is back before they run
    K[t, v]    it is at hand when they have run

and of each transfer the shares that are carried: o and f beside the ops of a stage, e and c while these wait; q and p
what is done, of a transfer that is under way, when a stage ends. Stage t takes Y[t] + D[t] seconds:

    Y[t]  = Σ_v out_v e[t, v] + Σ_v back_v c[t, v]      out_v, back_v: seconds that the link is busy with v
    D[t] >= Σ_k C_k R[t, k],  Σ_v out_v o[t, v],  Σ_v back_v f[t, v]      one link: the sum of the latter two

Its optimum is the best of plans by such stages, up to one thing: a link carries one transfer after another in a plan,
and here shares of several in turn. Where each transfer lies within a stage and nothing is waited for beside the ops
it is POET's program, in seconds, with landing buffers and the links' time counted. It is no bound of all plans, since
transfers may begin and end within a stage: `checkmate.solvers.host.every_plan` is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.solvers.linear import equations
from checkmate.solvers.linear.links import link_seconds
from checkmate.solvers.linear.model import INF, NONE, Entry, Model, Term
from checkmate.solvers.linear.touches import Touches


@dataclass(frozen=True, eq=False)
class Variables:
    """Columns of the model, `NONE` where the variable is known to be zero; all (T, V) but the last two, (T,)."""

    ops: equations.Variables  # R, S, FREE, OVER and U
    K: np.ndarray
    H: np.ndarray
    Out: np.ndarray
    In: np.ndarray
    E: np.ndarray
    F: np.ndarray
    q: np.ndarray
    p: np.ndarray
    e: np.ndarray
    o: np.ndarray
    c: np.ndarray
    f: np.ndarray
    Y: np.ndarray
    D: np.ndarray


def build(problem: Problem, budget: int, *, beside: bool = True) -> tuple[Model, Variables]:
    """The model of a problem with a second memory under a budget in bytes, its seconds in units of the mean op's.

    Args:
        beside: transfers may go on while ops run; else Out and In are zero, and E, F, H are POET's MOut, MIn, SSd.
    """
    host = host_of(problem)
    model, x = _variables(problem, budget, beside=beside)
    own = x.ops
    equations.depend_until_freed(model, own)
    keep_or_free(model, x)
    pairs(model, "stay or come back", after(own.S), [(x.K, -1.0), (after(x.F), -1.0)])
    send(model, x)
    fetch(model, x)
    carry(model, "send", (x.q, x.e, x.E, x.o), x.Out)
    carry(model, "fetch", (x.p, x.c, x.F, x.f), x.In)
    fit_there(model, x, problem, host)
    begin_stage(model, x, problem)
    equations.run_and_free(model, own, problem)
    equations.fit(model, own, problem, budget)
    fit_first_runs(model, x, problem, budget)
    if own.touches.saved.any():
        equations.write_over(model, own)
        equations.keep_one_copy(model, own)
    equations.run_at_most(model, own.R, problem)
    take_time(model, x, problem, host)
    return model, x


def host_of(problem: Problem) -> Host:
    """The second memory of a problem.

    Raises:
        ValueError: if it has none.
    """
    if problem.host is None:
        raise ValueError("This method is for a second memory, and the problem has none: Problem.with_host(Host(...)).")
    return problem.host


def may_go(problem: Problem, S: np.ndarray) -> np.ndarray:
    """(T, V) bool: where a value may be away, of those that may.

    Args:
        S: (T, V) bool, where it may be kept.
    """
    host, sizes = host_of(problem), problem.sizes
    away = sizes <= host.budget
    away[[*problem.limits.gone]] = False
    return S & away


def after(family: np.ndarray, none: int | bool = NONE) -> np.ndarray:
    """The same one stage later, (T, V); nothing after the last."""
    return np.vstack([family[1:], np.full((1, family.shape[1]), none)])


def before(family: np.ndarray, none: int | bool = NONE) -> np.ndarray:
    """The same one stage earlier, (T, V); nothing before the first."""
    return np.vstack([np.full((1, family.shape[1]), none), family[:-1]])


def _variables(problem: Problem, budget: int, *, beside: bool) -> tuple[Model, Variables]:
    known, plain = equations.build(problem, budget)  # where R, S, FREE and OVER can be one, and how large U
    model = Model()
    R, S, FREE, OVER = (family != NONE for family in (plain.R, plain.S, plain.FREE, plain.OVER))
    own = equations.Variables(
        R=model.variables(R, name="R", lower=np.eye(len(R)), integer=True),
        S=model.variables(S, name="S", integer=True),
        FREE=model.variables(FREE, name="FREE"),
        OVER=model.variables(OVER, name="OVER"),
        U=model.variables(plain.U != NONE, name="U", upper=np.where(plain.U != NONE, known.upper[plain.U], 0.0)),
        touches=plain.touches,
    )
    away = may_go(problem, S & after(S, False))  # while the ops of a stage run, and wanted later
    back, going = before(away, False), away & beside
    T = len(R)
    return model, Variables(
        own,
        K=model.variables(after(S, False), name="K", integer=True),
        H=model.variables(away, name="H", integer=True),
        Out=model.variables(going, name="Out", integer=True),
        In=model.variables(going, name="In", integer=True),
        E=model.variables(away, name="E", integer=True),
        F=model.variables(back, name="F", integer=True),
        q=model.variables(going, name="q"),
        p=model.variables(going, name="p"),
        e=model.variables(away, name="e"),
        o=model.variables(going, name="o"),
        c=model.variables(away | back, name="c"),
        f=model.variables(going, name="f"),
        Y=model.variables((T,), name="Y", upper=float("inf"), cost=1.0),
        D=model.variables((T,), name="D", upper=float("inf"), cost=1.0),
    )


def keep_or_free(model: Model, x: Variables) -> None:
    """What is at hand when ops have run was made by them or there before, and is not freed.

    K[t, v] + Σ_k FREE[t, v, k] <= R[t, prod(v)] + S[t, v]      every stage t, value v
    """
    own, touch = x.ops, x.ops.touches
    v, made_by = touch.values()
    freed = np.zeros((len(own.S), own.S.shape[1]), dtype=bool)
    t, e = np.nonzero(own.FREE != NONE)
    freed[t, touch.value[e]] = True
    there = freed | (x.K != NONE)
    rows = np.full(there.shape, NONE)
    s, i = np.nonzero(there)
    rows[s, i] = row = np.arange(len(s))
    producer = made_by[np.searchsorted(v, i)]
    terms: list[Entry] = [(row, x.K[s, i], 1.0), (row, own.R[s, producer], -1.0), (row, own.S[s, i], -1.0)]
    model.constrain_sparse("keep or free", len(s), [*terms, (rows[t, touch.value[e]], own.FREE[t, e], 1.0)], upper=0.0)


def send(model: Model, x: Variables) -> None:
    """What is sent is at hand and not made until its copy is there; nothing is sent twice.

    Out[t] <= S[t],  Out[t] <= K[t],  Out[t] + R[t, prod(v)] <= 1,  E[t] <= K[t-1],  Out[t-1] <= Out[t] + E[t]
    H[t] <= H[t-1] + E[t],  H[t] + Out[t] <= 1,  E[t] + H[t-1] <= 1,  E[t] + Out[t] <= 1      of v, every stage t
    """
    made = makers(x.ops.R, x.ops.touches, x.ops.S.shape)
    pairs(model, "send what is at hand", x.Out, [(x.ops.S, -1.0)])
    pairs(model, "hold what is sent", x.Out, [(x.K, -1.0)])
    pairs(model, "send or make", x.Out, [(made, 1.0)], upper=1.0)
    pairs(model, "complete what is held", x.E, [(before(x.K), -1.0)])
    pairs(model, "complete what is sent", before(x.Out), [(x.Out, -1.0), (x.E, -1.0)])
    pairs(model, "copy", x.H, [(before(x.H), -1.0), (x.E, -1.0)])
    pairs(model, "send no copy", x.H, [(x.Out, 1.0)], upper=1.0)
    pairs(model, "complete no copy", x.E, [(before(x.H), 1.0)], upper=1.0)
    pairs(model, "send once", x.E, [(x.Out, 1.0)], upper=1.0)


def fetch(model: Model, x: Variables) -> None:
    """What is fetched has a copy there, is not at hand and not made until it is back.

    In[t] <= H[t],  In[t] + S[t] <= 1,  In[t] + R[t, prod(v)] <= 1,  In[t-1] <= In[t] + F[t]
    F[t] <= H[t-1],  F[t] <= S[t],  F[t] + K[t-1] <= 1      of v, every stage t
    """
    made = makers(x.ops.R, x.ops.touches, x.ops.S.shape)
    pairs(model, "fetch a copy", x.In, [(x.H, -1.0)])
    pairs(model, "fetch what is away", x.In, [(x.ops.S, 1.0)], upper=1.0)
    pairs(model, "fetch or make", x.In, [(made, 1.0)], upper=1.0)
    pairs(model, "wait for what is fetched", before(x.In), [(x.In, -1.0), (x.F, -1.0)])
    pairs(model, "back from a copy", x.F, [(before(x.H), -1.0)])
    pairs(model, "back at hand", x.F, [(x.ops.S, -1.0)])
    pairs(model, "back what was away", x.F, [(before(x.K), 1.0)], upper=1.0)


def carry(model: Model, name: str, shares: tuple[np.ndarray, ...], under_way: np.ndarray) -> None:
    """What is carried of a transfer: all of it when it is over, and nothing of it counts when it is not under way.

    q[t] <= Out[t],  q[t] <= q[t-1] + e[t] - E[t] + o[t],  0 <= q[t-1] + e[t] - E[t]      of v, every stage t

    Args:
        name: of the direction.
        shares: done (q), carried while ops wait (e), whether it ends then (E), carried beside the ops (o).
        under_way: Out or In.
    """
    done, waiting, ends, beside = shares
    pairs(model, f"{name}: under way", done, [(under_way, -1.0)])
    pairs(model, f"{name}: done", done, [(before(done), -1.0), (waiting, -1.0), (ends, 1.0), (beside, -1.0)])
    pairs(model, f"{name}: over", ends, [(before(done), -1.0), (waiting, -1.0)])


def fit_there(model: Model, x: Variables, problem: Problem, host: Host) -> None:
    """Copies fit into the second memory while ops run, and while they wait.

    Σ_v M_v (H[t, v] + Out[t, v]) <= host budget
    Σ_v M_v Z[t, v] <= host budget,  Z[t, v] >= H[t, v],  Z[t, v] >= F[t, v]
    """
    M, room = problem.sizes / equations.size_unit(problem), host.budget / equations.size_unit(problem)
    Z = model.variables(x.F != NONE, name="Z")
    pairs(model, "copy while they wait", x.F, [(Z, -1.0)])
    there = np.where(Z == NONE, NONE, x.H)
    pairs(model, "copy then and later", there, [(Z, -1.0)])
    alone = np.where(Z == NONE, x.H, NONE)
    model.constrain("fit there", [(x.H, M), (x.Out, M)], upper=room)
    model.constrain("fit there while they wait", [(Z, M), (alone, M)], upper=room)


def begin_stage(model: Model, x: Variables, problem: Problem) -> None:
    """A stage begins with what is at hand, what is on its way back, and its op 0.

    U[t, 0] = Σ_v M_v (S[t, v] + In[t, v]) + R[t, 0] Σ_{v in out(0)} M_v
    """
    M, own, touch = problem.sizes / equations.size_unit(problem), x.ops, x.ops.touches
    first = touch.value[(touch.op == touch.made_by) & (touch.op == 0)]
    terms: list[Term] = [(own.U[:, :1], 1.0), (own.S, -M), (x.In, -M), (own.R[:, :1], -float(M[first].sum()))]
    model.constrain("begin stage", terms, lower=0.0, upper=0.0)


def fit_first_runs(model: Model, x: Variables, problem: Problem, budget: int) -> None:
    """The budget holds while an op runs for the first time, in K and In alone: knapsacks, from which cuts are made.

    Σ_{v not in in(t), out(t)} M_v (K[t, v] + In[t, v]) <= budget - Σ_{v in in(t), out(t)} M_v - W_t + saved_t
    """
    kept, landing = x.K.copy(), x.In.copy()
    for k, op in enumerate(problem.graph.ops):
        kept[k, [*op.inputs, *op.outputs]] = NONE
        landing[k, [*op.inputs, *op.outputs]] = NONE
    unit = equations.size_unit(problem)
    room = (budget - least_bytes(problem)) / unit
    model.constrain("fit first runs", [(kept, problem.sizes / unit), (landing, problem.sizes / unit)], upper=room)


def least_bytes(problem: Problem) -> np.ndarray:
    """(T,) int64: what every plan has at hand while each op runs for the first time, whatever it keeps beside."""
    sizes, results, made = problem.sizes, set(problem.graph.outputs), set[int]()
    found = []
    for k, op in enumerate(problem.graph.ops):
        here = [*made.union(op.inputs, op.outputs)]
        saved = problem.savings[k][0][1] if problem.savings[k] else 0
        found.append(problem.resident + int(sizes[here].sum()) + int(problem.workspace[k]) - saved)
        made |= results.intersection(op.outputs)
    return np.array(found, dtype=np.int64)


def take_time(model: Model, x: Variables, problem: Problem, host: Host) -> None:
    """A stage lasts as long as ops wait, and then as long as the ops and as each link."""
    out, back = link_seconds(problem, host)
    seconds = problem.seconds / equations.cost_unit(problem)
    model.constrain("wait", [(x.Y[:, None], 1.0), (x.e, -out), (x.c, -back)], lower=0.0)
    model.constrain("run", [(x.D[:, None], 1.0), (x.ops.R, -seconds)], lower=0.0)
    if host.one_link:
        model.constrain("link", [(x.D[:, None], 1.0), (x.o, -out), (x.f, -back)], lower=0.0)
    else:
        model.constrain("link there", [(x.D[:, None], 1.0), (x.o, -out)], lower=0.0)
        model.constrain("link back", [(x.D[:, None], 1.0), (x.f, -back)], lower=0.0)


def makers(R: np.ndarray, touches: Touches, shape: tuple[int, ...]) -> np.ndarray:
    """(T, V): R[t, prod(v)] of the values that may be kept, `NONE` of the others."""
    v, made_by = touches.values()
    made = np.full(shape, NONE)
    made[:, v] = R[:, made_by]
    return made


def pairs(
    model: Model,
    name: str,
    first: np.ndarray,
    others: list[tuple[np.ndarray, float]],
    *,
    upper: float = 0.0,
    lower: float = -INF,
) -> None:
    """A row for each variable of a family (T, V): it, and those of the same place in others, at most ``upper``."""
    at = np.nonzero(first != NONE)
    terms = [(first[at], 1.0), *((family[at], coefficient) for family, coefficient in others)]
    model.constrain(name, terms, lower=lower, upper=upper)
