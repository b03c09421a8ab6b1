"""Search for the largest batch size at which a method has a plan within a budget and a cap on the seconds.

`checkmate.max_batch_size` and `checkmate.fits` call it once for each method, with the problem of the step at any size.
The answer is a size that fits where the next does not, by proof or as far as the time went; that no larger one fits is
as true as memory and cost rise with the size.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from checkmate.core.problem import Problem
from checkmate.core.solution import OPTIMAL_GAP, Query, Solution, Status
from checkmate.sizes import LARGEST
from checkmate.sizes.largest_batch import SizePoint
from checkmate.solvers.search.adapt import Start, as_start
from checkmate.solvers.solve import attempt, refused

AUTO, KEEP_ALL = "auto", "checkpoint-all"
REACH = 16  # times the largest size that fits: a line to beyond is not worth much
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
    """Tell whether a plan takes at most this many seconds, up to rounding; waits for what is at home do not count."""
    waited = solution.waited if solution.problem.homes else 0.0
    return solution.plan is not None and solution.cost - waited <= cap * (1 + SUM_ROUNDING)


def is_beyond(solution: Solution, cap: float) -> bool:
    """Tell whether it is proven that no schedule takes so few seconds, beyond the tolerance of solvers."""
    is_dear = solution.bound > cap * (1 + OPTIMAL_GAP) and not solution.problem.homes
    return solution.status is Status.INFEASIBLE or is_dear


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
    for split in problem.splits_in_turn():
        solution = _plan_one(split, budget, cap, time_limit=time_limit, start=start if split is problem else None)
        if solution.plan is not None or solution.interrupted:
            return solution
        first = solution if first is None or is_beyond(first, cap) else first  # proven only if it is for each
    assert first is not None
    return first if is_beyond(first, cap) else refused(first, time_limit)


def _plan_one(problem: Problem, budget: int, cap: float, *, time_limit: float, start: Start | None) -> Solution:
    """A plan as `plan_within` finds it, without further splits."""
    if budget < problem.unavoidable_bytes.max():
        return Solution(Status.INFEASIBLE, problem, budget, "auto", bound=math.inf)
    deadline = time.perf_counter() + time_limit
    seconds_left, bound = time_limit, 0.0 if problem.homes else problem.keep_all_cost  # 0.0: any plan will do at first
    while True:
        # A solve ends at a gap of costs. With a bound b, a plan of cost c <= cap has a gap of at most 1 - b / cap: once
        # that is closed, there is nothing more to find.
        gap = min(1.0, max(0.0, 1 - bound / cap)) if cap > 0 else 0.0
        query = Query(problem, budget, seconds=max(seconds_left, 0.01), gap=gap, start=start)
        answer = attempt(query, progress=False)
        decided = answer.plan is None or is_within(answer, cap) or is_beyond(answer, cap) or answer.gap <= OPTIMAL_GAP
        seconds_left = deadline - time.perf_counter()
        if decided or seconds_left <= TINY * time_limit or answer.interrupted:
            return answer
        start, bound = answer, max(bound, answer.bound)


@dataclass(frozen=True)
class Attempt:
    """The answer of a method at one size."""

    size: int
    solution: Solution
    cap: float  # seconds

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
        return SizePoint.of(self.size, self.solution)


@dataclass
class SizeSearch:
    """The search of one method over the sizes: ``low`` fits, ``high`` does not."""

    problems: Callable[[int], Problem]
    budget: int  # bytes
    max_overhead: Overhead
    deadline: float  # of `time.perf_counter`
    try_seconds: float  # at most for one size
    method: str = AUTO
    smallest: int = 1
    largest: int = LARGEST
    report: Callable[[Attempt], None] = lambda attempt: None
    low: Attempt | None = None
    high: Attempt | None = None
    interrupted: bool = False  # by Ctrl-C
    has_homes: bool = False  # parameters are at home in a second memory: only "auto" plans the step so
    hint: int | None = None  # a size to try first
    widths: list[int] = field(default_factory=list)  # of the sizes left, once there are a low and a high

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
        if self.hint is not None and self.smallest <= self.hint <= self.largest:
            self.attempt(self.hint)
        if self.low is None and not self.attempt(self.smallest).fits:
            return None
        before = None
        while self.in_time and self.is_open:
            size, before = self._next(before), self._low
            self.attempt(size)
        return self.low

    def attempt(self, size: int) -> Attempt:
        """Try a size; a plan of the largest that fits may be where its search starts."""
        problem = self.problems(size)
        self.has_homes |= bool(problem.homes)
        if self.method != AUTO:  # others know of nothing at home elsewhere: they have all of it here
            problem = problem.with_homes(())
        cap = most_seconds(problem, self.max_overhead)
        start = None if self.low is None else as_start(self.low.solution, problem)
        seconds = min(self.try_seconds, max(0.05, self.deadline - time.perf_counter()))
        if self.method == AUTO and (problem.homes or problem.keep_all_peak > self.budget):
            solution = plan_within(problem, self.budget, cap, time_limit=seconds, start=start)
        else:
            method = KEEP_ALL if self.method == AUTO else self.method
            solution = attempt(Query(problem, self.budget, method, seconds, gap=0.0), progress=False)
        tried = Attempt(size, solution, cap)
        self.report(tried)
        if solution.interrupted:
            self.interrupted, self.deadline = True, 0.0
        if tried.fits and (self.low is None or size > self.low.size):
            self.low = tried
        elif not tried.fits and (self.high is None or size < self.high.size):
            self.high = tried
        return tried

    @property
    def _low(self) -> Attempt:
        assert self.low is not None
        return self.low

    @property
    def _end(self) -> int:
        """The first size beyond the search."""
        return self.largest + 1 if self.high is None else self.high.size

    def _next(self, before: Attempt | None) -> int:
        """The next size to try, between the one that fits and the end; ``before``: an earlier one that fits.

        Where all is kept, memory is nearly on a line through the last two sizes. Else sizes double until one does not
        fit, and what is left is halved.
        """
        low, end = self._low, self._end
        most = min(end - 1, REACH * low.size)
        if self.high is not None:
            self.widths.append(end - low.size)
        is_slow = len(self.widths) > 2 and 2 * self.widths[-1] > self.widths[-3]
        if self.method != KEEP_ALL or is_slow:
            return min(most, 2 * low.size) if self.high is None else (low.size + end) // 2
        # The line, from what is there at size 0 if no other is known.
        size, peak = low.size, low.solution.problem.keep_all_peak
        other_size, other_peak = 0, low.solution.problem.resident
        if self.high is not None:
            other_size, other_peak = self.high.size, self.high.solution.problem.keep_all_peak
        elif before is not None and before.size < size:
            other_size, other_peak = before.size, before.solution.problem.keep_all_peak
        if (other_peak - peak) * (other_size - size) <= 0:  # it does not grow
            return most
        return max(size + 1, min(most, size + (self.budget - peak) * (other_size - size) // (other_peak - peak)))


def spread_sizes(low: int, keep_all: int, high: int, count: int) -> list[int]:
    """Sizes for a curve: doubling up to the largest that keeps all, then evenly up to the largest.

    >>> spread_sizes(1, 16, 40, 4)
    [4, 8, 16, 22, 28, 34, 40]
    """
    doubling = {max(low, keep_all >> power) for power in range(3)} if keep_all else set()
    first = max(low, keep_all)
    return sorted(doubling | {first + round((high - first) * i / count) for i in range(count + 1)})
