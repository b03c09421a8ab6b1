"""Rows that say what must run in several segments between moments together: they tighten the bound of many moments.

In the linear relaxation of `checkmate.solvers.linear.moments` an op may run by half in each of two segments, from an
input of which a half is kept, and its value is at hand as a whole after the second. So the relaxation of many moments
can prove less than that of a few of them, in which the op runs once, from the whole input. For a span of segments
a..b, from moment a-1 to moment b, let ANY[j] say that op j runs in one of them at least:

    R[s, j] <= ANY[j] <= Σ_s R[s, j]               s in a..b
    ANY[j] <= X[a-1, v] + ANY[prod(v)]             v an input of op j, made before the span
    X[b, v] <= X[a-1, v] + ANY[prod(v)]            v made before the span

With them a model proves no less by its relaxation than each of the models whose segments are its spans. Every schedule
obeys them: the first run of j in the span finds v at hand, which either was so at moment a-1 or was made in the span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.linear.model import NONE, Model

LENGTHS = (2, 3, 5)  # of spans, in segments; and those that reach to the end


def spans(count: int) -> Iterator[tuple[int, int]]:
    """The first and the last of the segments of each span, of so many segments.

    >>> list(spans(3))
    [(0, 1), (0, 2), (1, 2)]
    """
    for a in range(count - 1):
        yield from ((a, b) for b in sorted({*(a + length - 1 for length in LENGTHS), count - 1}) if b < count)


def bind_spans(
    model: Model,
    R: np.ndarray,
    X: np.ndarray,
    carried: np.ndarray,
    problem: Problem,
    moments: Sequence[int],
    held: np.ndarray,
) -> None:
    """Add the rows of all spans to the model of these moments.

    Args:
        R: (m + 1, T) columns, and X, carried: (m, V), as in `checkmate.solvers.linear.moments.Relaxed`.
        held: (V,) bool, what has no columns, since it is always at hand once made.
    """
    graph, T = problem.graph, len(problem.graph.ops)
    made_by = np.array([-1 if value.producer is None else value.producer for value in graph.values])
    reads = [(j, v) for j, op in enumerate(graph.ops) for v in op.inputs if not held[v]]
    readers, read = np.array(reads, dtype=np.int64).reshape(-1, 2).T
    begins, ends = [0, *(o + 1 for o in moments)], [*moments, T - 1]
    k = np.arange(T)
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
