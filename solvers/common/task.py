"""The task of a method: problem, budget and clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from checkmate.core.problem import Problem


class OutOfTime(Exception):
    """Raised when the time is over, or when continuing gains nothing."""


@dataclass(frozen=True)
class Clock:
    """Counts seconds since it was made, up to so many.

    >>> clock = Clock(60.0)
    >>> clock.is_over, 17 < clock.share(0.3).left <= 18
    (False, True)
    """

    seconds: float = float("inf")
    began: float = field(default_factory=lambda: time.perf_counter())

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds that are left, 0.0 once it is over."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def is_over(self) -> bool:
        """Tell whether no second is left."""
        return self.elapsed >= self.seconds

    def share(self, part: float) -> Clock:
        """A clock that begins now, with this share of the seconds left."""
        return Clock(part * self.left)


@dataclass(frozen=True)
class Task:
    """Schedule a problem within a budget, as well as the time allows."""

    problem: Problem
    budget: int  # bytes
    clock: Clock = field(default_factory=Clock)
    gap: float = 0.0  # (cost - bound) / cost that is good enough
    threads: int = 1  # of solvers
    seed: int = 0  # of what is drawn at random

    def within(self, seconds: float, **changes: Any) -> Task:
        """The task with this many seconds from now, and with other changes."""
        return replace(self, clock=Clock(seconds), **changes)
