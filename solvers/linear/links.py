"""Variables and rows of a linear model for a second memory: values leave and come back by links while ops run.

Between moments i-1 and i a link carries a part out[i, v] of value v there and a part in[i, v] back, from 0 to 1.
H[i, v] is how much of a copy is there at moment i, L[i, v] how much has landed of a value that is not whole yet, and
F[i, v] says that it becomes whole between the moments, which then is as good as if its op had run:

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.solvers.linear.equations import LARGEST, cost_unit
from checkmate.solvers.linear.model import NONE, Model

SMALL = 2e-3  # of the bytes that keeping everything takes: values that take less together are not looked at


@dataclass(frozen=True, eq=False)
class LinkColumns:
    """Columns for m moments and V values, `NONE` where the variable is zero."""

    out: np.ndarray  # (m + 1, V)
    back: np.ndarray  # (m + 1, V): in
    F: np.ndarray  # (m + 1, V)
    H: np.ndarray  # (m, V)
    L: np.ndarray  # (m, V)


def negligible(problem: Problem) -> np.ndarray:
    """(V,) bool: the smallest values, whose bytes together are negligible."""
    sizes = problem.sizes
    order = np.argsort(sizes, kind="stable")
    small = np.zeros(len(sizes), dtype=bool)
    small[order[np.cumsum(sizes[order]) <= SMALL * (problem.keep_all_peak - problem.resident)]] = True
    return small


def add_links(model: Model, problem: Problem, ends: np.ndarray, made_by: np.ndarray, fixed: np.ndarray) -> LinkColumns:
    """Add the columns of the links between moments.

    Args:
        ends: (m + 1,) the last new op of each segment.
        made_by: (V,) the producer of each value, -1 where there is none.
        fixed: (V,) bool: what is at hand all the time.
    """
    may = ~fixed & (problem.sizes > 0)
    may[[*problem.limits.recomputed]] = False
    sent = may & (made_by <= ends[:, None])
    later = np.zeros_like(sent)
    later[1:] = may & (made_by <= ends[:-1, None])  # a complete copy is there when the segment begins
    out = model.variables(sent, name="out")
    back = model.variables(sent, name="in")
    F = model.variables(later, name="F")
    return LinkColumns(out, back, F, model.variables(sent[:-1], name="H"), model.variables(sent[:-1], name="L"))


def bind_links(
    model: Model, links: LinkColumns, R: np.ndarray, X: np.ndarray, problem: Problem, host: Host, made_by: np.ndarray
) -> None:
    """Add the equations of the links, except (1b', 1c', 9'), which belong to the moments."""
    before = np.vstack([np.full_like(X[:1], NONE), X]) if len(X) else np.full(links.out.shape, NONE)
    H_before, L_before = (np.vstack([np.full((1, a.shape[1]), NONE), a]) for a in (links.H, links.L))
    s, v = np.nonzero(links.out != NONE)
    out, back, F = links.out[s, v], links.back[s, v], links.F[s, v]
    here = [(before[s, v], -1.0), (R[s, made_by[v]], -1.0), (F, -1.0)]
    model.constrain("send what is here", [(out, 1.0), *here], upper=0.0)
    model.constrain("fetch what is there", [(back, 1.0), (H_before[s, v], -1.0), (out, -1.0)], upper=0.0)
    model.constrain("whole copies", [(F, 1.0), (H_before[s, v], -1.0)], upper=0.0)
    model.constrain("landed", [(F, 1.0), (L_before[s, v], -1.0), (back, -1.0)], upper=0.0)
    i, v = np.nonzero(links.H != NONE)
    model.constrain("there", [(links.H[i, v], 1.0), (H_before[i, v], -1.0), (links.out[i, v], -1.0)], upper=0.0)
    model.constrain("landing", [(links.L[i, v], 1.0), (L_before[i, v], -1.0), (links.back[i, v], -1.0)], upper=0.0)
    if len(links.H):
        share = np.minimum(problem.sizes / max(1, host.budget), LARGEST)
        model.constrain("fit there", [(links.H, share)], upper=1.0 if host.budget else 0.0)


def link_seconds(problem: Problem, host: Host) -> tuple[np.ndarray, np.ndarray]:
    """(V,), (V,): the time that a link is busy with each value, out and back, in units of the mean op.

    At most `LARGEST`, where no transfer is of any use: what takes longer is bounded from below by it as well.
    """
    with np.errstate(over="ignore"):
        there, back = ((host.latency + problem.sizes / rate) / cost_unit(problem) for rate in (host.send, host.fetch))
    return np.minimum(there, LARGEST), np.minimum(back, LARGEST)


def time_segments(model: Model, links: LinkColumns, R: np.ndarray, problem: Problem, host: Host) -> None:
    """Add a column for the time of each segment, the objective."""
    D = model.variables((len(R),), upper=np.inf, cost=1.0, name="D")[:, None]
    send, fetch = link_seconds(problem, host)
    model.constrain("ops", [(R, problem.seconds / cost_unit(problem)), (D, -1.0)], upper=0.0)
    if host.one_link:
        model.constrain("link", [(links.out, send), (links.back, fetch), (D, -1.0)], upper=0.0)
        return
    model.constrain("link there", [(links.out, send), (D, -1.0)], upper=0.0)
    model.constrain("link back", [(links.back, fetch), (D, -1.0)], upper=0.0)
