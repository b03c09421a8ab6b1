"""Search for the largest batch size at which a method has a plan within a budget and a cap on the seconds.

`checkmate.max_batch_size` calls it once for each method, with the problems of the step at all sizes:

    estimates by doubling and halving -> trace there -> estimates anew, from the nearer trace -> ... -> the next size

`checkmate.fits` estimates from two traces first, and searches on from there where it has time. The answer comes from a
trace, with its plan. It is a size that fits where the next does not, by proof or as far as the time went; that no
larger one fits is as true as memory and cost rise with the size.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from checkmate.batch import LARGEST
from checkmate.batch.result import SizePoint
from checkmate.batch.sized_steps import SizedProblems
from checkmate.core.problem import Problem
from checkmate.core.solution import OPTIMAL_GAP, Query, Solution, Status
from checkmate.solvers.search.adapt import Start, as_start
from checkmate.solvers.solve import attempt, refused

AUTO, KEEP_ALL = "auto", "checkpoint-all"
REACH = 16  # times the largest size that was traced: beyond, an estimate is not worth much
ONE_FORWARD = "one-forward"
Overhead = float | str | None
SUM_ROUNDING = 1e-9  # of a sum of seconds, in another order
TINY = 0.05  # of the time: with less left there is no use in asking again


def check_overhead(max_overhead: Overhead) -> None:
    """Raise a ValueError for an invalid cap on recomputation."""
    is_number = isinstance(max_overhead, numbers.Real) and not isinstance(max_overhead, bool)
    if max_overhead not in (None, ONE_FORWARD) and not (is_number and 0 <= max_overhead < math.inf):  # type: ignore[operator]
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
    """Tell whether a plan takes at most this many seconds, up to rounding."""
    return solution.plan is not None and solution.cost <= cap * (1 + SUM_ROUNDING)


def is_beyond(solution: Solution, cap: float) -> bool:
    """Tell whether it is proven that no schedule takes so few seconds, beyond the tolerance of solvers."""
    return solution.status is Status.INFEASIBLE or solution.bound > cap * (1 + OPTIMAL_GAP)


def plan_within(
    problem: Problem, budget: int, cap: float, *, time_limit: float, start: Start | None = None
) -> Solution:
    """A plan within budgets of bytes and of seconds; stops at the first one, or when none is proven to exist.

    `is_within` says if a Solution is such a plan, `is_beyond` if there is none.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> plan_within(chain, 3, 5.0, time_limit=1.0).cost
    4.0
    >>> plan_within(chain, 2, 5.0, time_limit=1.0).bound
    inf
    """
    first: Solution | None = None
    for one in problem.splits_in_turn():
        found = _plan_one(one, budget, cap, time_limit=time_limit, start=start if one is problem else None)
        if found.plan is not None or found.interrupted:
            return found
        first = found if first is None or is_beyond(first, cap) else first  # proven only if it is for each
    assert first is not None
    return first if is_beyond(first, cap) else refused(first, time_limit)


def _plan_one(problem: Problem, budget: int, cap: float, *, time_limit: float, start: Start | None) -> Solution:
    """A plan as `plan_within` finds it, without further splits."""
    if budget < problem.unavoidable_bytes.max():
        return Solution(Status.INFEASIBLE, problem, budget, "auto", bound=math.inf)
    deadline = time.perf_counter() + time_limit
    left, bound = time_limit, problem.keep_all_cost
    while True:
        # A solve ends at a gap of costs. With a bound b, a plan of cost c <= cap has a gap of at most 1 - b / cap: once
        # that is closed, there is nothing more to find.
        gap = min(1.0, max(0.0, 1 - bound / cap)) if cap > 0 else 0.0
        query = Query(problem, budget, seconds=max(left, 0.01), gap=gap, start=start)
        found = attempt(query, progress=False)
        decided = found.plan is None or is_within(found, cap) or is_beyond(found, cap) or found.gap <= OPTIMAL_GAP
        left = deadline - time.perf_counter()
        if decided or left <= TINY * time_limit or found.interrupted:
            return found
        start, bound = found, max(bound, found.bound)


def largest_size(fits: Callable[[int], bool], good: int, bad: int, step: int) -> int:
    """The largest size from ``good``, which fits, to below ``bad``: strides that double, then bisection.

    >>> tried = []
    >>> largest_size(lambda n: tried.append(n) or n <= 13, good=0, bad=100, step=4), tried
    (13, [4, 12, 28, 20, 16, 14, 13])
    """
    bracketed = False
    while bad - good > 1:
        size = (good + bad) // 2 if bracketed else min(good + step, bad - 1)
        if fits(size):
            good, step = size, 2 * step
        else:
            bad, bracketed = size, True
    return good


@dataclass(frozen=True)
class Attempt:
    """The answer of a method at one size."""

    size: int
    solution: Solution
    cap: float  # seconds
    traced: bool  # not estimated

    @property
    def fits(self) -> bool:
        """Tell whether there is a plan within the budget and the cap."""
        return is_within(self.solution, self.cap)

    @property
    def refuted(self) -> bool:
        """Tell whether it is proven that no schedule of any method is within budget and cap."""
        return not self.fits and is_beyond(self.solution, self.cap)

    @property
    def point(self) -> SizePoint:
        """The size as a point on the curve, if it fits."""
        return SizePoint.of(self.size, self.solution, traced=self.traced)


@dataclass
class SizeSearch:
    """The search of one method over the sizes: ``low`` fits, ``high`` does not; both are traced once found."""

    problems: SizedProblems
    budget: int  # bytes
    max_overhead: Overhead
    deadline: float  # of `time.perf_counter`
    try_seconds: float  # at most for one estimated size; a traced one gets twice as much
    method: str = AUTO
    smallest: int = 1
    largest: int = LARGEST
    sure: bool = True  # trace the size after the answer, too
    report: Callable[[Attempt], None] = lambda attempt: None
    low: Attempt | None = None
    high: Attempt | None = None
    interrupted: bool = False  # by Ctrl-C
    hint: int | None = None  # a size to try first
    near: bool = False  # the next guess is near the largest size known to fit

    @property
    def in_time(self) -> bool:
        """Tell whether there is time for another size."""
        return time.perf_counter() < self.deadline

    @property
    def is_open(self) -> bool:
        """Tell whether there are sizes between the one that fits and the one that does not."""
        return self._end - self._low.size > 1

    def run(self) -> Attempt | None:
        """Find the largest size; None if not even the smallest fits. Starts from an earlier ``low``."""
        if self.hint is not None:
            self.traced(self.hint)
        if self.low is None and not self.traced(self.smallest).fits:
            return None
        # Trace sizes above the smallest until two of them differ: else nothing can be estimated.
        traced, size, fits = self.problems.traced, self.smallest, True
        first = next(iter(traced.values())).live_bytes
        while fits and size < self.largest and all(np.array_equal(p.live_bytes, first) for p in traced.values()):
            size = min(REACH * size, self.largest)
            fits = self.in_time and size < self._end and self.traced(size).fits
        while self.in_time and self.is_open:
            width = None if self.high is None else self._end - self._low.size
            guess = self._guess()
            if guess > self._low.size:
                self.traced(guess)
            elif not self.sure:
                break
            else:
                # No larger size is estimated to fit: trace the next, and strides that double as long as they do.
                step = 1
                while self.in_time and self._low.size + step < self._end and self.traced(self._low.size + step).fits:
                    step *= 2
            if width is not None and self.is_open and 2 * (self._end - self._low.size) > width:
                self.traced((self._low.size + self._end) // 2)  # estimates are no good here
        return self.low

    def traced(self, size: int) -> Attempt:
        """Trace and try a size."""
        attempt = self._try(size, self.problems.at(size), 2 * self.try_seconds, self.low, traced=True)
        if attempt.fits and (self.low is None or size > self.low.size):
            self.low = attempt
        elif not attempt.fits and (self.high is None or size < self.high.size):
            self.high = attempt
        return attempt

    @property
    def _low(self) -> Attempt:
        assert self.low is not None
        return self.low

    @property
    def _end(self) -> int:
        """The first size beyond the search."""
        return self.largest + 1 if self.high is None else self.high.size

    def _guess(self) -> int:
        """The largest size that is estimated to fit; if nothing can be estimated, one to trace."""
        best, bad = self._low, min(self._end, REACH * max(self.problems.traced) + 1)
        step = 1 if self.near else best.size
        self.near = True
        if self.problems.estimate(best.size + 1) is None:
            return min(best.size + step, bad - 1) if self.high is None else (best.size + bad) // 2

        def fits(size: int) -> bool:
            nonlocal best
            problem = self.problems.estimate(size) if self.in_time else None
            if problem is None:
                return False
            attempt = self._try(size, problem, self.try_seconds, best, traced=False)
            best = attempt if attempt.fits else best
            return attempt.fits

        return largest_size(fits, best.size, bad, step)

    def _try(self, size: int, problem: Problem, seconds: float, known: Attempt | None, *, traced: bool) -> Attempt:
        """The method's answer at a size; it may start from the plan of a smaller size that is ``known`` to fit."""
        cap = most_seconds(problem, self.max_overhead)
        start = None if known is None else as_start(known.solution, problem)
        seconds = min(seconds, max(0.05, self.deadline - time.perf_counter()))
        if self.method == AUTO and problem.keep_all_peak > self.budget:
            solution = plan_within(problem, self.budget, cap, time_limit=seconds, start=start)
        else:
            method = KEEP_ALL if self.method == AUTO else self.method
            solution = attempt(Query(problem, self.budget, method, seconds, gap=0.0), progress=False)
        tried = Attempt(size, solution, cap, traced)
        self.report(tried)
        if solution.interrupted:
            self.interrupted, self.deadline = True, 0.0
        return tried


def spread_sizes(low: int, kept: int, high: int, count: int) -> list[int]:
    """Sizes for a curve: doubling up to the largest that keeps all, then evenly up to the largest.

    >>> spread_sizes(1, 16, 40, 4)
    [4, 8, 16, 22, 28, 34, 40]
    """
    doubling = {max(low, kept >> power) for power in range(3)} if kept else set()
    first = max(low, kept)
    return sorted(doubling | {first + round((high - first) * i / count) for i in range(count + 1)})
