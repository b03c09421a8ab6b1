"""What every plan with a second memory obeys, as an integer program: its optimum is a bound of all plans.

A plan is looked at in the moments in which ops run for the first time. Stage t is what happens after the first
execution of op t - 1 up to the end of that of op t, whatever it is and in whatever order. Of a plan,

    R[t, k]    op k runs in stage t, once or more often
    S[t, v]    v is at hand when op t runs for the first time, and was before
    H[t, v]    a copy is in the second memory then, complete and waited for
    Out[t, v]  v is on its way there then: asked for before, waited for later
    In[t, v]   it is on its way back then
    E[t, v]    a transfer there was waited for in stage t, before op t runs
    F[t, v]    a transfer back was
    q, p       the shares that are carried, of what is under way, when op t has run
    o, f       the shares carried in stage t; e, c those of transfers that were waited for in it

Then these hold, of every plan, and so the optimum of the program bounds it (each family of rows says why). The bytes
are asked for in these moments only, and the links' seconds stage by stage: that ops which run again fit beside what
stays, in which order transfers are carried, is left out. No row was added because good plans obey it: the two that
leave plans out, that a value is not kept, sent or made when nothing can read it any more, leave out useless steps only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkmate.core.host import Host
from checkmate.core.limits import lives
from checkmate.core.problem import Problem
from checkmate.solvers.host.stages import after, before, host_of, least_bytes, makers, may_go, pairs
from checkmate.solvers.linear import equations
from checkmate.solvers.linear.links import link_seconds
from checkmate.solvers.linear.model import INF, NONE, Model, Term
from checkmate.solvers.linear.touches import Touches


@dataclass(frozen=True, eq=False)
class Variables:
    """Columns of the model, `NONE` where the variable is known to be zero; (T, V) but R, (T, T), and D, (T,)."""

    R: np.ndarray
    S: np.ndarray
    here: np.ndarray  # at hand when stage t begins: S of the stage before, or made by its op
    made: np.ndarray  # R[t, prod(v)] of what runs again
    over: np.ndarray  # op t writes over v when it runs for the first time
    H: np.ndarray
    Out: np.ndarray
    In: np.ndarray
    E: np.ndarray
    F: np.ndarray
    o: np.ndarray
    f: np.ndarray
    e: np.ndarray
    c: np.ndarray
    D: np.ndarray


def build(problem: Problem, budget: int) -> tuple[Model, Variables]:
    """The model of a problem with a second memory under a budget in bytes, its seconds in units of the mean op's."""
    host, touch = host_of(problem), Touches.of(problem)
    model, x = _variables(problem, budget, touch)
    have_inputs(model, x, touch)
    stay(model, x, problem)
    go_and_come(model, x)
    fit(model, x, problem, budget, host)
    fit_again(model, x, problem, budget, touch)
    take_time(model, x, problem, host)
    equations.run_at_most(model, x.R, problem)
    return model, x


def _variables(problem: Problem, budget: int, touch: Touches) -> tuple[Model, Variables]:
    graph, T = problem.graph, len(problem.graph.ops)
    _, plain = equations.build(problem, budget)  # which runs can be of use, and fit
    model, there = Model(), plain.R != NONE
    v, made_by = touch.values()
    read = np.array(lives(graph, problem.limits.until)[1])
    stage = np.arange(T)[:, None]
    S = np.zeros((T, len(graph.values)), dtype=bool)
    S[:, v] = (stage > made_by) & (stage <= read[v])
    needed, over = np.zeros_like(S), np.zeros_like(S)
    for k, op in enumerate(graph.ops):
        needed[k, [*op.inputs]] = True
        over[k, [w for w, _ in problem.savings[k]]] = True
    R = model.variables(there, name="R", lower=np.eye(T), integer=True)
    x_S = model.variables(S, name="S", lower=needed.astype(float), integer=True)
    made = makers(R, touch, S.shape)
    own = np.zeros_like(S)
    own[made_by, v] = True
    here = np.where(before(own, False), before(np.where(own, made, NONE)), before(x_S))
    soon = may_go(problem, S)
    away = soon & after(S, False)

    def binary(name: str, where: np.ndarray) -> np.ndarray:
        return model.variables(where, name=name, integer=True)

    def share(name: str, where: np.ndarray) -> np.ndarray:
        return model.variables(where, name=name)

    H, Out, In = (binary(name, away) for name in ("H", "Out", "In"))
    E, F = (binary(name, soon) for name in "EF")
    q, p = (share(name, away) for name in "qp")
    o, f, e, c = (share(name, soon) for name in "ofec")
    carry(model, "send", (q, e, E, o), Out)
    carry(model, "fetch", (p, c, F, f), In)
    made = np.where(own, NONE, made)
    D = model.variables((T,), name="D", upper=float("inf"), cost=1.0)
    return model, Variables(R, x_S, here, made, binary("OVER", over), H, Out, In, E, F, o, f, e, c, D)


def carry(model: Model, name: str, shares: tuple[np.ndarray, ...], under_way: np.ndarray) -> None:
    """What is carried in stage t: all of what ended in it and was not carried before, and some of what goes on.

    q[t] <= Out[t],  o[t] >= E[t] + q[t] - q[t-1],  e[t] >= E[t] - q[t-1]      of v, every stage t

    Of v that was sent more often than once in a stage more was carried.
    """
    done, ended, ends, carried = shares
    pairs(model, f"{name}: under way", done, [(under_way, -1.0)])
    pairs(model, f"{name}: carried", carried, [(ends, -1.0), (done, -1.0), (before(done), 1.0)], upper=INF, lower=0.0)
    pairs(model, f"{name}: ended", ended, [(ends, -1.0), (before(done), 1.0)], upper=INF, lower=0.0)


def have_inputs(model: Model, x: Variables, touch: Touches) -> None:
    """An op that runs again finds its inputs: here when the stage began, made or fetched in it.

    R[t, j] + over[t-1, v] <= here[t, v] + R[t, prod(v)] + F[t, v]      every stage t, op j < t, input v of j

    What op t - 1 has written over is not here. Inputs of op t itself have S[t, v] = 1.
    """
    there = (x.R[:, touch.op] != NONE) & touch.reads
    there[touch.op, np.arange(len(touch.op))] = False
    t, e = np.nonzero(there)
    v = touch.value[e]
    terms = [(x.R[t, touch.op[e]], 1.0), *((family[t, v], sign) for family, sign in _sources(x))]
    model.constrain("have inputs", terms, upper=0.0)


def stay(model: Model, x: Variables, problem: Problem) -> None:
    """What is at hand in a moment was so in the one before, or was made or fetched between; as what is sent is.

    S[t, v], E[t, v] <= here[t, v] - over[t-1, v] + R[t, prod(v)] + F[t, v]      every stage t, value v
    S[t, v] <= R[t, prod(v)]      the first stage t of the backward, v that a rule has made again there
    """
    pairs(model, "stay", x.S, _sources(x))
    pairs(model, "send what is here", x.E, _sources(x))
    t = problem.graph.forward_length
    gone = np.full(x.S.shape, NONE)
    if problem.limits.gone:
        gone[t, [*problem.limits.gone]] = x.S[t, [*problem.limits.gone]]
    pairs(model, "made again", gone, [(x.made, -1.0)])


def go_and_come(model: Model, x: Variables) -> None:
    """What has a copy was sent; what comes back has one, and is not at hand; what is under way is waited for.

    Out[t] <= S[t],  Out[t] + over[t] <= 1,  H[t] + Out[t] <= 1,  H[t] <= H[t-1] + E[t],  Out[t-1] <= Out[t] + E[t]
    In[t] + S[t] <= 1,  In[t] <= H[t],  F[t] <= H[t-1] + E[t],  In[t-1] <= In[t] + F[t]      of v, every stage t
    """
    pairs(model, "send what is at hand", x.Out, [(x.S, -1.0)])
    pairs(model, "write over nothing sent", x.Out, [(x.over, 1.0)], upper=1.0)
    pairs(model, "send no copy", x.H, [(x.Out, 1.0)], upper=1.0)
    pairs(model, "copy", x.H, [(before(x.H), -1.0), (x.E, -1.0)])
    pairs(model, "wait for what is sent", before(x.Out), [(x.Out, -1.0), (x.E, -1.0)])
    pairs(model, "fetch what is away", x.In, [(x.S, 1.0)], upper=1.0)
    pairs(model, "fetch a copy", x.In, [(x.H, -1.0)])
    pairs(model, "back from a copy", x.F, [(before(x.H), -1.0), (x.E, -1.0)])
    pairs(model, "wait for what is fetched", before(x.In), [(x.In, -1.0), (x.F, -1.0)])


def fit(model: Model, x: Variables, problem: Problem, budget: int, host: Host) -> None:
    """Both budgets hold in each moment.

    Σ_{v not in in(t)} M_v S[t, v] + Σ_v M_v In[t, v] - Σ_v saved_v over[t, v] <= budget - what op t has at hand
    Σ_v M_v (H[t, v] + Out[t, v]) <= host budget,  Σ_v over[t, v] <= 1
    """
    unit, kept = equations.size_unit(problem), x.S.copy()
    M, saved, most = problem.sizes / unit, np.zeros(x.S.shape), np.zeros(len(x.S))
    for k, op in enumerate(problem.graph.ops):
        kept[k, [*op.inputs]] = NONE
        for v, less in problem.savings[k]:
            saved[k, v] = less / unit
        most[k] = saved[k].max()
    room = (budget - least_bytes(problem)) / unit - most
    model.constrain("fit", [(kept, M), (x.In, M), (x.over, -saved)], upper=room)
    model.constrain("fit there", [(x.H, M), (x.Out, M)], upper=host.budget / unit)
    model.constrain("write over one", [(x.over, 1.0)], upper=1.0)


def fit_again(model: Model, x: Variables, problem: Problem, budget: int, touch: Touches) -> None:
    """An op that runs again fits beside what was at hand all the time: from one moment to the next, and not new.

    Σ_{v not in in(k), out(k)} M_v stays[t, v] + own_k R[t, k] <= budget - resident - results before stage t
    stays[t, v] >= S[t, v] - R[t, prod(v)] - F[t, v]      every stage t, op k < t

    own_k: inputs, outputs and workspace of op k, less what its best way saves.
    """
    graph, sizes, unit = problem.graph, problem.sizes, equations.size_unit(problem)
    results, T = set(graph.outputs), len(graph.ops)
    stays = model.variables(x.S != NONE, name="stays")
    pairs(model, "new or there before", x.S, [(x.made, -1.0), (x.F, -1.0), (stays, -1.0)])
    made = np.zeros(T + 1)
    own = np.zeros(T)
    for k, op in enumerate(graph.ops):
        made[k + 1] = made[k] + sum(int(sizes[v]) for v in op.outputs if v in results)
        own[k] = int(sizes[[*op.outputs, *(v for v in op.inputs if v not in results)]].sum()) + problem.workspace[k]
        own[k] -= problem.savings[k][0][1] if problem.savings[k] else 0
    t, again = np.nonzero(np.tril(x.R != NONE, -1))
    beside = stays[t]
    for row, k in enumerate(again.tolist()):
        beside[row, [*graph.ops[k].inputs, *graph.ops[k].outputs]] = NONE
    room = (budget - problem.resident - made[:T])[t] / unit
    terms: list[Term] = [(beside, sizes / unit), (x.R[t, again], own[again] / unit)]
    model.constrain("fit again", terms, upper=room)


def take_time(model: Model, x: Variables, problem: Problem, host: Host) -> None:
    """A stage lasts as long as its ops, as each link is busy in it, and as what ended in it took before its last op.

    D[t] >= Σ_k C_k R[t, k],  Σ_v out_v o[t, v],  Σ_v back_v f[t, v]
    D[t] >= C_t + Σ_v out_v e[t, v],  C_t + Σ_v back_v c[t, v]

    One link: the sums over both directions.
    """
    out, back = link_seconds(problem, host)
    seconds, D = problem.seconds / equations.cost_unit(problem), x.D[:, None]
    model.constrain("ops", [(D, 1.0), (x.R, -seconds)], lower=0.0)
    ways = [("link", [(x.o, -out), (x.f, -back)], [(x.e, -out), (x.c, -back)])]
    if not host.one_link:
        ways = [("link there", [(x.o, -out)], [(x.e, -out)]), ("link back", [(x.f, -back)], [(x.c, -back)])]
    for name, carried, ended in ways:
        model.constrain(name, [(D, 1.0), *carried], lower=0.0)
        model.constrain(f"{name}, then the op", [(D, 1.0), *ended], lower=seconds)


def _sources(x: Variables) -> list[tuple[np.ndarray, float]]:
    """(T, V) each: where a value that is at hand in stage t is from, in a row that is at most 0."""
    return [(x.here, -1.0), (before(x.over), 1.0), (x.made, -1.0), (x.F, -1.0)]
