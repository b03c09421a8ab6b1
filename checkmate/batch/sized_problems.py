"""The problem of a step at any size of its batch: traced at a few sizes, estimated between them.

Tracing takes seconds, and near the largest size that fits there are many sizes to try. Where traces have the same ops,
the bytes of every value are taken to lie on the polynomial through those of the traced sizes next to it,

    bytes_v(n) = sum_i bytes_v(n_i) · prod_{j != i} (n - n_j) / (n_i - n_j)

a parabola between traced sizes, and a line beyond them, where a parabola would blow rounding up; and so are seconds,
workspaces and resident bytes. This is a guess of where to look: no answer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from checkmate.core.fingerprint import same_ops
from checkmate.core.problem import Problem, Profile
from checkmate.core.ways import Way


class SizedProblems:
    """The problems of one step at different sizes. ``trace`` gives the problem of a size.

    >>> def trace(n):
    ...     return Problem.from_dag([[], [0], [0, 1]], seconds=[n] * 3, sizes=[4 * n] * 3)
    >>> problems = SizedProblems(trace)
    >>> problems.at(1).keep_all_peak, problems.at(3).keep_all_peak, problems.estimate(7).keep_all_peak
    (12, 36, 84)
    >>> sorted(problems.traced)
    [1, 3]
    """

    def __init__(self, trace: Callable[[int], Problem]) -> None:
        self._trace = trace
        self.traced: dict[int, Problem] = {}

    def at(self, size: int) -> Problem:
        """The problem of a size, traced."""
        if size not in self.traced:
            self.traced[size] = self._trace(size)
        return self.traced[size]

    def estimate(self, size: int) -> Problem | None:
        """The problem of a size from the traced sizes next to it; None where they differ in more than figures."""
        if size in self.traced:
            return self.traced[size]
        sizes = self._around(size)
        if len(sizes) < 2 or not same_ops(self.traced[sizes[0]], self.traced[sizes[1]]):
            return None
        sizes = [n for n in sizes if same_ops(self.traced[n], self.traced[sizes[0]])]
        return _mixed([self.traced[n] for n in sizes], _shares(sizes, size))

    def _around(self, size: int) -> list[int]:
        """Traced sizes to estimate from: those on both sides and a third, or two on one side, none near to another.

        A jump of a few bytes, or seconds measured at a bad time, would be drawn out to the size asked for.
        """
        below = sorted((n for n in self.traced if n < size), reverse=True)
        above = sorted(n for n in self.traced if n > size)
        nearest = sorted([*below, *above], key=lambda n: abs(n - size))
        if below and above:
            ends = [below[0], above[0]]
            apart = [n for n in nearest if 2 * min(abs(n - end) for end in ends) >= ends[1] - ends[0]]
            return [*ends, *apart[:1]]
        apart = [n for n in nearest[1:] if 8 * abs(n - nearest[0]) >= abs(size - nearest[0])]
        return [*nearest[:1], *(apart or nearest[1:])[:1]]


def _shares(sizes: list[int], size: int) -> list[float]:
    """Lagrange's polynomials of the traced sizes at another one; they sum up to 1.

    >>> _shares([1, 3], 2)
    [0.5, 0.5]
    """
    return [math.prod((size - other) / (own - other) for other in sizes if other != own) for own in sizes]


def _mixed(problems: list[Problem], shares: list[float]) -> Problem:
    """A problem with the graph of all and the weighted sums of their figures."""

    def total(figures: list[np.ndarray]) -> np.ndarray:
        return np.maximum(0.0, sum(share * f for share, f in zip(shares, figures, strict=True)))

    def whole(figures: list[np.ndarray]) -> np.ndarray:
        return np.ceil(total(figures) - 1e-6).astype(np.int64)

    graph = problems[0].graph
    sizes = whole([np.array([value.size_bytes for value in p.graph.values]) for p in problems])
    values = tuple(replace(value, size_bytes=int(n)) for value, n in zip(graph.values, sizes, strict=True))
    profile = Profile(
        seconds=total([p.seconds for p in problems]),
        workspace_bytes=whole([p.workspace for p in problems]),
        resident_bytes=int(whole([np.array(p.resident) for p in problems])),
        source=f"{problems[0].profile.source}; another size, estimated",
        estimated=tuple(range(len(graph.ops))),
        ways=tuple(way for way in _mixed_ways(problems, whole) if sizes[way.makes] == sizes[way.over]),
    )
    smaller = partial(_smaller, problems, shares) if all(p.smaller is not None for p in problems) else None
    host, splits = problems[0].host, problems[0].splits
    return Problem(replace(graph, values=values), profile, host=host, splits=splits, smaller=smaller)


def _smaller(problems: list[Problem], shares: list[float]) -> Problem | None:
    """The same of the steps split further; None where not all of them are split in the same way."""
    split = [smaller for p in problems if p.smaller is not None and (smaller := p.smaller()) is not None]
    alike = len(split) == len(problems) and all(same_ops(split[0], other) for other in split[1:])
    return _mixed(split, shares) if alike else None


def _mixed_ways(problems: list[Problem], whole: Callable[[list[np.ndarray]], np.ndarray]) -> Iterator[Way]:
    """The ways that all problems have, their workspaces mixed."""
    workspaces = [{(way.op, way.makes, way.over): way.workspace for way in p.profile.ways} for p in problems]
    for way in problems[0].profile.ways:
        key = way.op, way.makes, way.over
        if all(key in of for of in workspaces):
            yield replace(way, workspace=int(whole([np.array(of[key]) for of in workspaces])))
