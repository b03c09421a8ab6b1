"""Cuts for the model of some moments (`checkmate.solvers.linear.moments`): every schedule obeys them.

**Paths.** In the relaxation an op runs in part in each of several segments, from an input of which a part is kept, and
its value is there as a whole. Take a span of segments a..b and an op j of before the span that runs in segment s of it.
Let v_1 be an input of j, v_2 one of the op that makes v_1, and so on to v_n, made by op k, all from before the span:

    R[s, j] <= Σ_i X[a-1, v_i] + Σ_{s' in a..b} R[s', k]

Proof: the first run of j in the span finds v_1 at hand. Either that was so at moment a-1, or its op ran in the span
before; then the same holds of that op and v_2. At the end of the path op k has run in the span. With the same right
side

    1 <= ...            where an op that runs for the first time in the span reads v_1
    X[b, v_1] <= ...    where moment b carries v_1

Where there is a second memory v_i may also have come back in the span: Σ_{s' in a..b} F[s', v_i] is added for each. The
shortest path to each op is found for all spans at once by dynamic programming along the ops, so no cut of this kind
that a solution breaks is missed.

**Rounding.** The rows that say "fit" are knapsacks of few large values, of which the relaxation holds 1.8 where 1 fits.
Mixed-integer rounding of Σ_j a_j x_j <= b in units of d, with x_j replaced by 1 - x_j where it is large,

    Σ_j (⌊a_j / d⌋ + max(0, f_j - f) / (1 - f)) x_j <= ⌊b / d⌋,   f = b / d - ⌊b / d⌋, f_j likewise

holds for all x_j in {0, 1} (Marchand and Wolsey, "Aggregation and Mixed Integer Rounding to Solve MIPs", 2001).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from checkmate.solvers.linear.model import NONE, Row
from checkmate.solvers.linear.moment_model import MomentModel

BROKEN = 0.02  # by how much a solution must break the cut of a path, of one run
BROKEN_ROUNDED = 0.01  # and a rounded row, over the length of its coefficients
ALIKE = 4  # cuts of paths with the same left side in one round
MOST = 1000  # of paths in one round
PARTS = (1, 2, 3)  # units of rounding: these parts of a value's bytes
LARGE = (0.98, 0.75, 0.5)  # what is more of x_j is replaced by 1 - x_j

# By how much a cut is broken, its span, and its left side: a segment or a moment, an op, a value, each `NONE` where
# there is none.
Side = tuple[float, int, int, int, int]


@dataclass(frozen=True)
class Path:
    """The cut of a path within a span of ops, for all models with moments before the span and at its end.

    Its left side is an op's run, a value kept at the end of the span, or one: a new op reads the first value.
    """

    begin: int  # the first new op of the span
    end: int  # the last
    values: tuple[int, ...]
    maker: int  # op that makes the last of them, `NONE`: none
    run: int = NONE  # the op on the left side
    within: tuple[int, int] = (0, 0)  # first and last new op of the segment in which it runs
    kept: bool = False

    def rows(self, x: MomentModel) -> Iterator[Row]:
        """Yield its rows: of a run, one for each segment that was a part of the segment it was in."""
        a, b, *within = (np.searchsorted(x.begins, (self.begin, self.end, *self.within), side="right") - 1).tolist()
        values = np.array(self.values)
        right = [x.carried[a - 1, values]]
        if x.links is not None:
            right.append(x.links.F[a : b + 1, values].ravel())
        if self.maker != NONE:
            right.append(x.R[a : b + 1, self.maker])
        less = np.concatenate(right)
        less = less[less != NONE]
        if self.kept:
            left = [int(x.X[b, values[0]])]
        else:
            left = [NONE] if self.run == NONE else x.R[within[0] : within[1] + 1, self.run].tolist()
        for column in left:
            if column != NONE:
                yield Row(np.append(less, column), np.append(np.full(len(less), -1.0), 1.0), 0.0, self)
            elif self.run == NONE and not self.kept:
                yield Row(less, np.full(len(less), -1.0), -1.0, self)


class PathCuts:
    """Finds the cuts of paths that a solution breaks.

    It goes through all spans of two segments or more at once; arrays (P,) have an entry for each.
    """

    def __init__(self, model: MomentModel) -> None:
        self.of, m = model, len(model.X)
        first, last = np.triu_indices(m + 1, 1)
        self.first, self.last = first[first > 0], last[first > 0]  # segments (P,), ascending by the first
        self.begin = model.begins[self.first]
        self.ends = np.append(model.begins[1:], model.R.shape[1]) - 1  # (m + 1,) the last new op of each segment
        segment = np.searchsorted(model.begins, np.arange(model.R.shape[1]), side="right") - 1
        self.reads: list[list[tuple[int, int]]] = [[] for _ in range(m + 1)]  # per segment: new ops and old inputs
        for j, values in enumerate(model.inputs):
            self.reads[segment[j]] += [(j, v) for v in values if model.made_by[v] < model.begins[segment[j]]]

    def broken(self, x: np.ndarray) -> Iterator[Row]:
        """Yield the cuts that a solution breaks, of each left side the `ALIKE` that it breaks most."""
        model, first, last, begin = self.of, self.first, self.last, self.begin
        if not len(first):
            return
        R, X, carried = (np.where(family == NONE, 0.0, x[family]) for family in (model.R, model.X, model.carried))
        # What a path takes in: an old value carried into the span, or fetched in it; and how often ops run in it.
        total = np.vstack([np.zeros(R.shape[1]), R.cumsum(axis=0)])
        ran = (total[last + 1] - total[first]).T  # (T, P)
        available = carried[first - 1].T  # (V, P)
        if model.links is not None:
            fetched = np.where(model.links.F == NONE, 0.0, x[model.links.F]).cumsum(axis=0)
            available = available + (fetched[last] - fetched[first - 1]).T
        # The least right side of a path from each op, and its next value. Ops that are new in the span run in it.
        least = np.ones((len(ran) + 1, len(first)))
        least[-1] = 0.0  # nothing makes a value without an op
        following = np.full(ran.shape, NONE)
        for k in range(int(begin[-1])):
            old = slice(int(np.searchsorted(begin, k, side="right")), None)  # spans that begin behind op k
            sum_, next_ = np.minimum(1.0, ran[k, old]), following[k, old]
            for v in model.inputs[k]:
                through = available[v, old] + least[model.made_by[v], old]
                less = through < sum_ - 1e-12
                sum_, next_ = np.where(less, through, sum_), np.where(less, v, next_)
            least[k, old], following[k, old] = sum_, next_
        # Left sides above it, the worst first.
        sides = [*self._runs(R, least, following), *self._reads(available, least), *self._kept(X, available, least)]
        often, count = Counter[tuple[int, ...]](), 0
        for _, p, *side in sorted(sides, key=lambda side: -side[0]):
            often[tuple(side)] += 1
            if often[tuple(side)] <= ALIKE and count < MOST:
                count += 1
                yield from self._path(p, *side, following=following).rows(model)

    def _runs(self, R: np.ndarray, least: np.ndarray, following: np.ndarray) -> Iterator[Side]:
        """Yield runs of old ops: segment and op."""
        before, most = np.zeros(R.shape[1]), np.zeros(R.shape[1])  # what the span one shorter lacks
        spans = np.stack([self.first, self.last, self.begin], axis=1).tolist()
        for p, (first, last, begin) in enumerate(spans):
            if last == first + 1:
                before, most = np.zeros(R.shape[1]), R[first]
            most = np.maximum(most, R[last])
            lacks = most - least[:-1, p]
            lacks[begin:] = 0.0
            for j in np.flatnonzero((lacks > BROKEN) & (lacks > before + 1e-12) & (following[:, p] != NONE)).tolist():
                yield float(lacks[j]), p, first + int(R[first : last + 1, j].argmax()), j, NONE
            before = lacks

    def _reads(self, available: np.ndarray, least: np.ndarray) -> Iterator[Side]:
        """Yield new ops that read an old value: op and value."""
        for p, (begin, last) in enumerate(zip(self.begin.tolist(), self.last.tolist(), strict=True)):
            for j, v in self.reads[last]:
                made_by = self.of.made_by[v]
                if made_by < begin and (lacks := 1.0 - available[v, p] - least[made_by, p]) > BROKEN:
                    yield float(lacks), p, NONE, j, v

    def _kept(self, X: np.ndarray, available: np.ndarray, least: np.ndarray) -> Iterator[Side]:
        """Yield old values at hand at the end of the span: moment and value."""
        model = self.of
        for p, (begin, last) in enumerate(zip(self.begin.tolist(), self.last.tolist(), strict=True)):
            if last < len(X):
                values = np.flatnonzero((model.X[last] != NONE) & (model.made_by < begin))
                lacks = X[last, values] - available[values, p] - least[model.made_by[values], p]
                for i in np.flatnonzero(lacks > BROKEN).tolist():
                    yield float(lacks[i]), p, last, NONE, int(values[i])

    def _path(self, p: int, s: int, j: int, v: int, *, following: np.ndarray) -> Path:
        """The shortest path of a span from a left side."""
        within = (int(self.of.begins[s]), int(self.ends[s])) if v == NONE else (0, 0)
        values = [int(following[j, p]) if v == NONE else v]
        while (k := int(self.of.made_by[values[-1]])) >= 0 and (v_ := int(following[k, p])) != NONE:
            values.append(v_)
        return Path(
            begin=int(self.begin[p]),
            end=int(self.ends[self.last[p]]),
            values=tuple(values),
            maker=k,
            run=j if v == NONE else NONE,
            within=within,
            kept=s != NONE and v != NONE,
        )


def rounded(fit: Iterable[tuple[np.ndarray, np.ndarray, int]], x: np.ndarray) -> Iterator[Row]:
    """Yield for each row Σ bytes · column <= room the rounded one that a solution breaks most, if it breaks any.

    >>> [row] = rounded([(np.arange(2), np.array([5, 5]), 9)], np.array([0.9, 0.9]))  # one of the two fits
    >>> row.coefficients, round(row.upper)
    (array([1., 1.]), 1)
    """
    for columns, sizes, room in fit:
        values = x[columns]
        between = (values > 0.01) & (values < 0.99) & (sizes > 0)
        best, row = BROKEN_ROUNDED, None
        for unit in np.unique(sizes[between]).tolist():
            for part, large in ((part, large) for part in PARTS for large in LARGE):
                # In parts of a unit, so that all numbers are whole.
                turned = values > large
                a, b = part * np.where(turned, -sizes, sizes), part * (room - int(sizes[turned].sum()))
                f, f_j = b % unit / unit, a % unit / unit
                if not 1e-6 < f < 0.999:
                    continue
                coefficients = a // unit + np.maximum(0.0, f_j - f) / (1 - f)
                beyond = coefficients @ np.where(turned, 1 - values, values) - b // unit
                beyond /= max(1.0, float(np.linalg.norm(coefficients)) / 3)
                if beyond > best:
                    upper = b // unit - coefficients[turned].sum()
                    signed = np.where(turned, -coefficients, coefficients)
                    best, row = beyond, Row(columns, signed, float(upper) + 1e-9)
        if row is not None:
            yield row
