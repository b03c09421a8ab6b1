"""What a step costs at many sizes of its batch: traced at a few of them, and estimated in between.

Tracing takes seconds, and near the largest size that fits there are many sizes to try. Where traces have the same ops,
the bytes of every value are taken to lie on the polynomial through those of the traced sizes next to it,

    bytes_v(n) = sum_i bytes_v(n_i) · prod_{j != i} (n - n_j) / (n_i - n_j)

a parabola between traced sizes, and a line beyond them, where a parabola would blow rounding up; and so are seconds,
workspaces and resident bytes. Allocators round, kernels change with the shape and programs pad, so this is a guess of
where to look: no answer rests on it.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from checkmate.core.fingerprint import same_ops
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status
from checkmate.core.ways import Way
from checkmate.solvers.search.adapt import Start
from checkmate.solvers.solve import attempt, refused

ONE_FORWARD = "one-forward"
Overhead = float | str | None
SUM_ROUNDING = 1e-9  # of a sum of seconds, in another order
TINY = 0.05  # of the time: with less left there is no use in asking again


class Family:
    """The problems of one step at different sizes. ``trace`` gives the problem of a size.

    >>> def trace(n):
    ...     return Problem.from_dag([[], [0], [0, 1]], seconds=[n] * 3, sizes=[4 * n] * 3)
    >>> family = Family(trace)
    >>> family.at(1).keep_all_peak, family.at(3).keep_all_peak, family.estimate(7).keep_all_peak
    (12, 36, 84)
    >>> sorted(family.traced)
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
        if len(sizes) < 2:
            return None
        first, second, *_ = sizes
        if not same_ops(self.traced[first], self.traced[second]):
            return None
        sizes = [n for n in sizes if same_ops(self.traced[n], self.traced[first])]
        return _mixed([self.traced[n] for n in sizes], _shares(sizes, size))

    def _around(self, size: int) -> list[int]:
        """Traced sizes to estimate from: those on both sides and a third, or two on one side.

        None of them is so near to another that a jump of a few bytes, or seconds measured at a bad time, would be drawn
        out to the size asked for.
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
    problem = Problem(replace(graph, values=values), profile, host=host, splits=splits, smaller=smaller)
    return replace(problem, rounding=max(known.rounding for known in problems))


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


def check_overhead(max_overhead: Overhead) -> None:
    """Raise a ValueError for what is no cap on recomputation."""
    if max_overhead is None or max_overhead == ONE_FORWARD:
        return
    wrong = isinstance(max_overhead, (bool, str)) or not isinstance(max_overhead, numbers.Real)
    if wrong or not 0 <= max_overhead < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"max_overhead is a share of the step such as 0.3 for 30 % recomputation, {ONE_FORWARD!r}, or None for no "
            f"cap, not {max_overhead!r}."
        )


def most_seconds(problem: Problem, max_overhead: Overhead) -> float:
    """The seconds that a step may take under a cap on recomputation.

        "one-forward"      2 · forward + backward             (Jain et al. 2020, Equation 10)
        a number r         (1 + r) · (forward + backward)
        None               no cap

    >>> problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1, 2, 6], sizes=[4] * 3, forward=2)
    >>> most_seconds(problem, "one-forward"), most_seconds(problem, 0.5), most_seconds(problem, None)
    (12.0, 13.5, inf)
    """
    if max_overhead is None:
        return math.inf
    if isinstance(max_overhead, str):
        return problem.keep_all_cost + float(problem.seconds[: problem.graph.forward_length].sum())
    return problem.keep_all_cost * (1 + max_overhead)


def is_within(solution: Solution, cap: float) -> bool:
    """Whether there is a plan, and it takes no more than so many seconds, but for rounding."""
    return solution.plan is not None and solution.cost <= cap * (1 + SUM_ROUNDING)


def is_beyond(solution: Solution, cap: float) -> bool:
    """Whether it is proven that no schedule takes so few seconds, by more than solvers are exact to."""
    return solution.status is Status.INFEASIBLE or solution.bound > cap * (1 + OPTIMAL_GAP)


def plan_within(
    problem: Problem, budget: int, cap: float, *, time_limit: float, start: Start | None = None
) -> Solution:
    """A plan within a budget of bytes and one of seconds; stops as soon as there is one, or none is proven to be.

    A solve ends once its gap is closed as far as asked for, and that is a question of costs alone. So it is asked for
    the gap at which no more is to be known: with a bound b, a plan of cost c <= cap has a gap of at most 1 - b / cap.

    Returns:
        A Solution; `is_within` says if it is such a plan, `is_beyond` if there is none.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> plan_within(chain, 3, 5.0, time_limit=1.0).cost
    4.0
    >>> plan_within(chain, 2, 5.0, time_limit=1.0).bound
    inf
    """
    first: Solution | None = None
    for one in problem.and_smaller():
        found = _plan_one(one, budget, cap, time_limit=time_limit, start=start if one is problem else None)
        if found.plan is not None or found.interrupted:
            return found
        first = found if first is None or is_beyond(first, cap) else first  # proven only if it is for each
    assert first is not None
    return first if is_beyond(first, cap) else refused(first, time_limit=time_limit)


def _plan_one(problem: Problem, budget: int, cap: float, *, time_limit: float, start: Start | None) -> Solution:
    """The same of a problem as it is, not split further."""
    if budget < problem.unavoidable_bytes.max():
        return Solution(Status.INFEASIBLE, problem, budget, "auto", bound=math.inf)
    deadline = time.perf_counter() + time_limit
    left, bound = time_limit, problem.keep_all_cost
    while True:
        gap = min(1.0, max(0.0, 1 - bound / cap)) if cap > 0 else 0.0
        found = attempt(problem, budget, time_limit=max(left, 0.01), gap=gap, start=start, progress=False)
        decided = found.plan is None or is_within(found, cap) or is_beyond(found, cap) or found.gap <= OPTIMAL_GAP
        left = deadline - time.perf_counter()
        if decided or left <= TINY * time_limit or found.interrupted:
            return found
        start, bound = found, max(bound, found.bound)
