"""The largest size of a step that a method can plan within a budget and a cap on its seconds.

    estimates by doubling and halving -> trace there -> estimates anew, from the nearer trace -> ... -> the next size

The answer always comes from a trace, with its plan. It is a size that fits where the next does not, by proof or as far
as the time went; that no larger one fits is as true as memory and cost rise with the size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from checkmate.batch.interpolation import Family, Overhead, is_beyond, is_within, most_seconds, plan_within
from checkmate.core.fingerprint import same_ops
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.solvers.catalogue import METHODS

AUTO, KEEP_ALL = "auto", "checkpoint-all"
REACH = 16  # times the largest size that was traced: beyond, an estimate is not worth much


@dataclass(frozen=True)
class Attempt:
    """What a method answers at one size."""

    size: int
    solution: Solution
    cap: float  # seconds
    traced: bool  # not estimated

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the budget and the cap."""
        return is_within(self.solution, self.cap)

    @property
    def refuted(self) -> bool:
        """Whether it is proven that no schedule is within them, by any method."""
        return not self.fits and is_beyond(self.solution, self.cap)


@dataclass
class Hunt:
    """The search of one method over the sizes.

    ``low`` fits and ``high`` does not; both are traced, once found.
    """

    family: Family
    budget: int  # bytes
    max_overhead: Overhead
    smallest: int
    largest: int
    deadline: float  # of `time.perf_counter`
    try_seconds: float  # at most for one estimated size; a traced one gets twice as much
    method: str = AUTO
    sure: bool = True  # trace the size after the answer, too
    report: Callable[[Attempt], None] = lambda attempt: None
    low: Attempt | None = None
    high: Attempt | None = None
    interrupted: bool = False  # by Ctrl-C
    hint: int | None = None  # a size to try first
    _guessed: bool = False  # once: the next guess is near

    @property
    def in_time(self) -> bool:
        """Whether there is time for another size."""
        return time.perf_counter() < self.deadline

    def run(self) -> Attempt | None:
        """Find the largest size; None if not even the smallest fits. An earlier ``low`` is where to begin."""
        if self.hint is not None:
            self.traced(self.hint)
        if self.low is None and not self.traced(self.smallest).fits:
            return None
        self._spread()
        while self.in_time and self.is_open():
            width = None if self.high is None else self._end - self._low.size
            guess = self._guess()
            if guess > self._low.size:
                self.traced(guess)
            elif not self.sure:
                break
            else:
                self._stride()
            if width is not None and self.is_open() and 2 * (self._end - self._low.size) > width:
                self.traced((self._low.size + self._end) // 2)  # estimates are no good here
        return self.low

    def traced(self, size: int) -> Attempt:
        """Try a size as it is."""
        attempt = self._try(size, self.family.at(size), 2 * self.try_seconds, traced=True)
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
        """The first size that is not to be tried."""
        return self.largest + 1 if self.high is None else self.high.size

    def is_open(self) -> bool:
        """Whether there are sizes between the one that fits and the one that does not."""
        return self._end - self._low.size > 1

    def _spread(self) -> None:
        """Trace sizes above the smallest until two of them differ: else nothing can be estimated."""
        first, size = self.family.at(self.smallest).live_bytes, self.smallest
        while size < self.largest and all(np.array_equal(p.live_bytes, first) for p in self.family.traced.values()):
            size = min(REACH * size, self.largest)
            if not self.in_time or size >= self._end or not self.traced(size).fits:
                return

    def _guess(self) -> int:
        """The largest size that fits by estimate; where nothing can be estimated, one to trace."""
        good, bad = self._low.size, min(self._end, REACH * max(self.family.traced) + 1)
        step, bracketed = 1 if self._guessed else good, False
        self._guessed = True
        start = self._low.solution
        while bad - good > 1 and self.in_time:
            size = (good + bad) // 2 if bracketed else min(good + step, bad - 1)
            problem = self.family.estimate(size)
            if problem is None:
                return size if self.high is None else (good + bad) // 2
            attempt = self._try(size, problem, self.try_seconds, traced=False, start=start)
            if attempt.fits:
                good, start, step = size, attempt.solution, 2 * step
            else:
                bad, bracketed = size, True
        return good

    def _stride(self) -> None:
        """Trace the next size and, as long as they fit, sizes twice as far: estimates said that none does."""
        step = 1
        while self.in_time and self._low.size + step < self._end:
            if not self.traced(self._low.size + step).fits:
                return
            step *= 2

    def _try(
        self, size: int, problem: Problem, seconds: float, *, traced: bool, start: Solution | None = None
    ) -> Attempt:
        cap = most_seconds(problem, self.max_overhead)
        if start is None and self.low is not None:
            start = self.low.solution
        if start is not None and (start.plan is None or not same_ops(start.problem, problem)):
            start = None  # the graph may change with the size
        seconds = min(seconds, max(0.05, self.deadline - time.perf_counter()))
        if self.method in (AUTO, KEEP_ALL) and problem.keep_all_peak <= self.budget:
            solution = METHODS[KEEP_ALL].solve(problem, self.budget)
        elif self.method == AUTO:
            solution = plan_within(problem, self.budget, cap, time_limit=seconds, start=start)
        else:
            solution = METHODS[self.method].solve(problem, self.budget, time_limit=seconds)
        attempt = Attempt(size, solution, cap, traced)
        self.report(attempt)
        if solution.interrupted:
            self.interrupted, self.deadline = True, 0.0
        return attempt


def spread_sizes(low: int, kept: int, high: int, count: int) -> list[int]:
    """Sizes for a curve: up to the largest that keeps all by doubling, from there to the largest evenly.

    >>> spread_sizes(1, 16, 40, 4)
    [4, 8, 16, 22, 28, 34, 40]
    """
    doubling = {max(low, kept >> power) for power in range(3)} if kept else set()
    first = max(low, kept)
    return sorted(doubling | {first + round((high - first) * i / count) for i in range(count + 1)})
