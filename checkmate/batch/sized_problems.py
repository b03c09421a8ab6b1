"""The problem of a step at any batch size: traced at a few sizes, interpolated between them.

Tracing takes seconds, and near the largest size that fits there are many sizes to try. Where traces have the same ops,
the bytes of every value are taken to lie on the polynomial through those of the traced sizes next to it,

    bytes_v(n) = sum_i bytes_v(n_i) · prod_{j != i} (n - n_j) / (n_i - n_j)

a parabola between traced sizes, and a line beyond them, where a parabola would blow rounding up; and so are seconds,
workspaces and resident bytes. This is a guess of where to look: no answer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from checkmate.core.fingerprint import renumbered
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Problem, Profile


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

    def __init__(self, trace: Callable[[int], Problem], traced: Mapping[int, Problem] | None = None) -> None:
        self._trace = trace
        self.traced = dict(traced or {})

    def at(self, size: int) -> Problem:
        """The problem of a size, traced."""
        if size not in self.traced:
            self.traced[size] = self._trace(size)
        return self.traced[size]

    def estimate(self, size: int) -> Problem | None:
        """The problem of a size, interpolated from the traced sizes next to it; None if their graphs differ."""
        if size in self.traced:
            return self.traced[size]
        # Estimate from sizes on both sides and a third, or from two on one side, none near to another: a jump of a few
        # bytes, or seconds measured at a bad time, would be drawn out to the size asked for.
        below = sorted((n for n in self.traced if n < size), reverse=True)
        above = sorted(n for n in self.traced if n > size)
        nearest = sorted([*below, *above], key=lambda n: abs(n - size))
        if below and above:
            ends = [below[0], above[0]]
            apart = [n for n in nearest if 2 * min(abs(n - end) for end in ends) >= ends[1] - ends[0]]
            sizes = [*ends, *apart[:1]]
        else:
            apart = [n for n in nearest[1:] if 8 * abs(n - nearest[0]) >= abs(size - nearest[0])]
            sizes = [*nearest[:1], *(apart or nearest[1:])[:1]]
        alike = [n for n in sizes if renumbered(self.traced[n], self.traced[sizes[0]]) is not None]
        if len(alike) < 2 or sizes[1] not in alike:
            return None
        # Lagrange's polynomials of these sizes at the one asked for, which sum up to 1
        shares = [math.prod((size - other) / (own - other) for other in alike if other != own) for own in alike]
        return _mixed([self.traced[n] for n in alike], shares)


def _mixed(problems: list[Problem], shares: list[float]) -> Problem | None:
    """A problem with the first graph and weighted sums of all figures; None if the ops differ."""
    numbered = [numbers for p in problems if (numbers := renumbered(p, problems[0])) is not None]
    if len(numbered) < len(problems):
        return None

    def total(figures: Iterable[np.ndarray | int]) -> np.ndarray:
        return np.maximum(0.0, sum(share * f for share, f in zip(shares, figures, strict=True)))

    def whole(figures: Iterable[np.ndarray | int]) -> np.ndarray:
        return np.ceil(total(figures) - 1e-6).astype(np.int64)

    def key(problem: Problem, way: InPlace) -> tuple[str, ...]:
        values = [problem.graph.values[v].name for v in (way.over, way.makes) if v is not None]
        return problem.graph.ops[way.op].name, *values

    graph, in_order = problems[0].graph, [*zip(problems, numbered, strict=True)]
    sizes = whole(np.array([p.graph.values[v].size_bytes for v in values]) for p, (_, values) in in_order)
    # The ways that all problems have.
    workspaces, ways = [{key(p, way): way.workspace for way in p.profile.ways} for p in problems], []
    for way in problems[0].profile.ways:
        name = key(problems[0], way)
        if all(name in of for of in workspaces) and (way.makes is None or sizes[way.makes] == sizes[way.over]):
            ways.append(replace(way, workspace=int(whole(of[name] for of in workspaces))))
    profile = Profile(
        seconds=total(p.seconds[ops] for p, (ops, _) in in_order),
        workspace_bytes=whole(p.workspace[ops] for p, (ops, _) in in_order),
        resident_bytes=int(whole(p.resident for p in problems)),
        source=f"{problems[0].profile.source}; another size, estimated",
        estimated=tuple(range(len(graph.ops))),
        ways=tuple(ways),
        state_bytes=problems[0].profile.state_bytes,
    )

    def next_split() -> Problem | None:
        """The weighted sum of further splits, if all steps are split in the same way."""
        split = [one for p in problems if p.next_split is not None and (one := p.next_split()) is not None]
        return _mixed(split, shares) if len(split) == len(problems) else None

    values = tuple(replace(value, size_bytes=int(n)) for value, n in zip(graph.values, sizes, strict=True))
    further = next_split if all(p.next_split is not None for p in problems) else None
    return replace(problems[0], graph=replace(graph, values=values), profile=profile, codegen=None, next_split=further)
