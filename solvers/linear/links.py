"""Rows of a linear model for the links to a second memory, between moments (`checkmate.solvers.linear.moments`).

Values leave and come back by links while ops run. Between moments i-1 and i a link carries a part out[i, v] of value v
there and a part in[i, v] back, from 0 to 1. H[i, v] is how much of a copy is there at moment i, L[i, v] how much has
landed of a value that is not whole yet, and F[i, v] says that it becomes whole between the moments, which then is as
good as if its op had run:

    R[i, j] <= X[i-1, v] + R[i, prod(v)] + F[i, v]          v an input of op j      (1b')
    X[i, v] <= X[i-1, v] + R[i, prod(v)] + F[i, v]                                  (1c')
    out[i, v] <= X[i-1, v] + R[i, prod(v)] + F[i, v]        what is sent is at hand
    H[i, v] <= H[i-1, v] + out[i, v]
    in[i, v] <= H[i-1, v] + out[i, v],   F[i, v] <= H[i-1, v]
    L[i, v] <= L[i-1, v] + in[i, v],     F[i, v] <= L[i-1, v] + in[i, v]
    Σ_v M_v (X[i, v] + L[i, v]) <= room at moment i                                 (9')
    Σ_v M_v H[i, v] <= host budget

and the time D_i from moment i-1 to moment i is long enough for the ops and for each link, with the sum of both where
there is one link for both ways:

    D_i >= Σ_k C_k R[i, k],   D_i >= Σ_v s_v out[i, v],   D_i >= Σ_v f_v in[i, v]

s_v and f_v are the seconds that v keeps a link busy. Any plan maps to such numbers with Σ D_i at most its seconds: a
value that is sent or lands partly before and partly after a moment is at hand at it with all its bytes, of which L
counts a part. A value that is both sent and fetched between two moments was at hand there anyway. So the least Σ D_i is
a bound for all plans. Values so small that all of them together make no difference are at hand all the time in it.

What is at home in the second memory has a copy there, and so needs no H to be fetched, from the first segment on. Let
K[v] say that a copy is kept here from call to call. Then, of v at home, overwritten by op u or by none,

    R[1, j] <= K[v] + F[1, v],   X[1, v] <= K[v] + F[1, v],   K[v] <= X[m, v] + F[m+1, v],   Σ_v M_v K[v] <= room
    Σ_i out[i, v] >= 1 over the segments from that of u on; up to i < m+1 it is Σ out[i, v] + X[i, v] >= 1

The first op waits for what it reads and is not kept, and the step ends when what the last one overwrites is sent:
these seconds are added to D_1 and D_{m+1}. `EPS` of the seconds of links is added to the objective, so that the model
moves nothing for nothing, and twice as much for kept copies where K is for the model to choose; `proven_seconds` takes
off the most that this may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.solvers.linear.equations import LARGEST, cost_unit, size_unit
from checkmate.solvers.linear.model import NONE, Model, Term

EPS = 2e-4  # of the seconds of links, in the objective of a model with homes


@dataclass(frozen=True, eq=False)
class LinkColumns:
    """Columns for m moments and V values, `NONE` where the variable is zero."""

    out: np.ndarray  # (m + 1, V)
    back: np.ndarray  # (m + 1, V): in
    F: np.ndarray  # (m + 1, V)
    H: np.ndarray  # (m, V)
    L: np.ndarray  # (m, V)
    kept: np.ndarray  # (V,): K


def add_links(
    model: Model, problem: Problem, ends: np.ndarray, made_by: np.ndarray, fixed: np.ndarray, *, choose: bool = False
) -> LinkColumns:
    """Add the columns of the links between moments.

    Args:
        ends: (m + 1,) the last new op of each segment.
        made_by: (V,) the producer of each value, -1 where there is none.
        fixed: (V,) bool: what is at hand all the time.
        choose: for each home whether a copy is kept is a variable.
    """
    may = ~fixed & (problem.sizes > 0)
    may[[*problem.limits.recomputed]] = False
    homes, kept = (np.isin(np.arange(len(made_by)), [*values]) for values in (problem.homes, problem.kept))
    moved = may & (made_by <= ends[:, None])
    later = moved & homes
    later[1:] = may & (made_by <= ends[:-1, None])  # a complete copy is there when the segment begins
    over, T = problem.graph.overwritten_by, len(problem.graph.ops)
    first = np.array([over.get(v, T) for v in range(len(made_by))])
    sent = moved & (~homes | (first <= ends[:, None]))
    send, fetch = link_seconds(problem, problem.host) if problem.host is not None else (0.0, 0.0)
    eps = EPS if problem.homes else 0.0
    out = model.variables(sent, cost=eps * send, name="out")
    back = model.variables(moved, cost=eps * fetch, name="in")
    F = model.variables(later, name="F")
    H, L = model.variables(sent[:-1] & ~homes, name="H"), model.variables(moved[:-1], name="L")
    price = 2 * eps * fetch if choose else 0.0
    K = model.variables(may & homes & (kept | choose), lower=kept, cost=price, name="kept")
    return LinkColumns(out, back, F, H, L, K)


def bind_links(
    model: Model, links: LinkColumns, R: np.ndarray, X: np.ndarray, problem: Problem, host: Host, made_by: np.ndarray
) -> None:
    """Add the equations of the links, except (1b', 1c', 9'), which belong to the moments."""
    before = np.vstack([np.full_like(X[:1], NONE), X]) if len(X) else np.full(links.out.shape, NONE)
    H_before, L_before = (np.vstack([np.full((1, a.shape[1]), NONE), a]) for a in (links.H, links.L))
    s, v = np.nonzero(links.out != NONE)
    makers, kept = np.where(made_by[v] < 0, NONE, R[s, made_by[v]]), np.where(s == 0, links.kept[v], NONE)
    sources = [(before[s, v], -1.0), (makers, -1.0), (links.F[s, v], -1.0), (kept, -1.0)]
    model.constrain("send what is here", [(links.out[s, v], 1.0), *sources], upper=0.0)
    s, v = np.nonzero((links.back != NONE) & (made_by >= 0))
    out, back, F = links.out[s, v], links.back[s, v], links.F[s, v]
    model.constrain("fetch what is there", [(back, 1.0), (H_before[s, v], -1.0), (out, -1.0)], upper=0.0)
    model.constrain("whole copies", [(F, 1.0), (H_before[s, v], -1.0)], upper=0.0)
    s, v = np.nonzero(links.back != NONE)
    landed = [(links.F[s, v], 1.0), (L_before[s, v], -1.0), (links.back[s, v], -1.0)]
    model.constrain("landed", landed, upper=0.0)
    i, v = np.nonzero(links.H != NONE)
    model.constrain("there", [(links.H[i, v], 1.0), (H_before[i, v], -1.0), (links.out[i, v], -1.0)], upper=0.0)
    i, v = np.nonzero(links.L != NONE)
    model.constrain("landing", [(links.L[i, v], 1.0), (L_before[i, v], -1.0), (links.back[i, v], -1.0)], upper=0.0)
    if len(links.H):
        room = host.budget - problem.homes_bytes
        share = np.minimum(problem.sizes / max(1, room), LARGEST)
        model.constrain("fit there", [(links.H, share)], upper=1.0 if room else 0.0)


def link_seconds(problem: Problem, host: Host) -> tuple[np.ndarray, np.ndarray]:
    """(V,), (V,): the time that a link is busy with each value, out and back, in units of the mean op.

    At most `LARGEST`, where no transfer is of any use: what takes longer is bounded from below by it as well.
    """
    with np.errstate(over="ignore"):
        out, back = ((host.latency + problem.sizes / rate) / cost_unit(problem) for rate in (host.send, host.fetch))
    return np.minimum(out, LARGEST), np.minimum(back, LARGEST)


def time_segments(
    model: Model, links: LinkColumns, R: np.ndarray, problem: Problem, host: Host, small: np.ndarray | None
) -> None:
    """Add a column for the time of each segment, the objective.

    Args:
        small: (V,) bool where it is chosen what is kept: values that may be kept without a variable that says so.
    """
    D = model.variables((len(R),), upper=np.inf, cost=1.0, name="D")[:, None]
    send, fetch = link_seconds(problem, host)
    # The first op waits for what it reads and is not kept; what the last op has overwritten goes home after it.
    begins = [v for v in problem.homes.intersection(problem.graph.ops[0].inputs) if small is None or not small[v]]
    ends = problem.homes.intersection(problem.graph.ops[-1].overwrites)
    alone = np.zeros(len(R))
    alone[0] += fetch[[v for v in begins if v not in problem.kept]].sum()
    alone[-1] += send[[*ends]].sum()
    chosen = np.full((len(R), len(begins)), NONE)
    chosen[0] = [NONE if v in problem.kept else links.kept[v] for v in begins]
    ops: list[Term] = [(R, problem.seconds / cost_unit(problem)), (chosen, -fetch[begins]), (D, -1.0)]
    model.constrain("ops", ops, upper=-alone)
    if host.one_link:
        model.constrain("link", [(links.out, send), (links.back, fetch), (D, -1.0)], upper=0.0)
        return
    model.constrain("link there", [(links.out, send), (D, -1.0)], upper=0.0)
    model.constrain("link back", [(links.back, fetch), (D, -1.0)], upper=0.0)


def bind_homes(
    model: Model,
    links: LinkColumns,
    R: np.ndarray,
    X: np.ndarray,
    problem: Problem,
    budget: int,
    ends: np.ndarray,
    readers: np.ndarray,
    read: np.ndarray,
) -> None:
    """Add the rows of homes: where each is at first, when it is sent, and where it ends.

    Args:
        ends: (m + 1,) the last new op of each segment.
        readers, read: pairs of an op of the first segment and a home that it reads.
    """
    at_first = [(links.F[0], -1.0), (links.kept, -1.0)]
    model.constrain("depend at first", [(R[0, readers], 1.0), *((of[read], c) for of, c in at_first)], upper=0.0)
    homes = np.array([v for v in sorted(problem.homes) if links.back[0, v] != NONE], dtype=np.int64)
    if len(X):
        model.constrain("keep at first", [(X[0, homes], 1.0), *((of[homes], c) for of, c in at_first)], upper=0.0)
        stay = [(links.kept[homes], 1.0), (X[-1, homes], -1.0), (links.F[-1, homes], -1.0)]
        model.constrain("stay in the end", stay, upper=0.0)
    for v, by in problem.graph.overwritten_by.items():
        for i in np.flatnonzero(ends >= by) if v in homes else ():
            sent, kept = links.out[: i + 1, v], X[i, v] if i < len(X) else NONE
            model.constrain(f"send {v} by {i} or stay", [(sent[None], 1.0), (np.array([kept]), 1.0)], lower=1.0)
    unit, values = size_unit(problem), problem.graph.values
    results = [v for v in problem.graph.outputs if values[v].producer is not None]
    room = (budget - problem.resident - int(problem.sizes[results].sum())) / unit
    model.constrain("keep what fits", [(links.kept[None], problem.sizes / unit)], upper=room)


def proven_seconds(problem: Problem, objective: float, *, choose: bool = False) -> float:
    """The seconds that every plan takes, by the least objective of a model with homes."""
    if not problem.homes or problem.host is None:
        return objective * cost_unit(problem)
    chosen = link_seconds(problem, problem.host)[1][[*problem.homes]].sum() if choose else 0.0
    return float(objective - 2 * EPS * chosen) / (1 + 2 * EPS) * cost_unit(problem)
