"""What a running solve knows so far: the best plan, the best bound, how both came about, and a line that shows it.

Methods write here as they go (`found`, `proved`), from however deep inside; whoever solves reads. So a solve that is
interrupted, or one of whose solvers fails, still has its best plan, and a person at a terminal sees the gap close.
"""

from __future__ import annotations

import logging
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.solvers.common.certify import certify, contradicts, faults
from checkmate.solvers.common.runs import cost_of
from checkmate.statusline import showing
from checkmate.units import format_seconds

NOTABLE = 1e-4  # a bound that rises by a smaller share is not worth a line: solvers report hundreds of them
log = logging.getLogger("checkmate.solve")
_current: ContextVar[Progress | None] = ContextVar("checkmate_progress", default=None)


class Progress:
    """The best plan and bound of one solve. As a context manager it is the one that `found` and `proved` write to.

    Args:
        problem: what is solved.
        budget: bytes.
        time_limit: seconds, for the line.
        shown: show a line on standard error; None: on a terminal only, after two seconds.

    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> with Progress(problem, budget=8, time_limit=1.0) as progress:
    ...     found(problem, 8, np.eye(2, dtype=bool), "by hand")
    >>> progress.cost, progress.bound
    (2.0, 2.0)
    """

    def __init__(self, problem: Problem, budget: int, time_limit: float, shown: bool | None = None) -> None:
        self.problem, self.budget, self.time_limit = problem, budget, time_limit
        self.began = time.perf_counter()
        self.R: np.ndarray | None = None
        self.cost = float("inf")
        self.bound = problem.keep_all_cost
        self.trajectory: list[tuple[float, float, float]] = []  # (seconds, cost, bound) at each notable change
        self._lock = threading.Lock()  # solvers report from threads of their own
        self._line = showing(self._text, share=lambda: self.elapsed / time_limit, shown=shown)

    @property
    def elapsed(self) -> float:
        """Seconds since the solve began."""
        return time.perf_counter() - self.began

    @property
    def gap(self) -> float:
        """(cost - bound) / cost of what is known so far."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0

    def __enter__(self) -> Progress:
        self._token = _current.set(self)
        self._line.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _current.reset(self._token)
        self._line.__exit__(kind, error, at)

    def take(self, R: np.ndarray, by: str, verified: bool = False) -> None:
        """Keep a schedule (T, T) if it is cheaper than the best so far and the verifier has nothing against it."""
        cost = cost_of(self.problem, R)
        if cost >= self.cost or (not verified and faults(self.problem, self.budget, R)):
            return
        with self._lock:
            if cost < self.cost:
                if contradicts(self.bound, cost):
                    self.bound = self.problem.keep_all_cost  # a verified schedule is proof against it
                self.R, self.cost = R.copy(), cost
                self._record(by)

    def raise_bound(self, bound: float) -> None:
        """Keep a lower bound in seconds if it is better, and no schedule that is known contradicts it."""
        with self._lock:
            if bound > self.bound and not contradicts(bound, self.cost):
                self.bound = bound
                last = self.trajectory[-1][2] if self.trajectory else 0.0
                if bound > last * (1 + NOTABLE):
                    self._record("bound")

    def solution(self, **fields: Any) -> Solution:
        """The best plan so far as a certified Solution."""
        assert self.R is not None
        return certify(self.problem, self.budget, self.R, bound=self.bound, **fields)

    def describe(self) -> str:
        """The incumbent, the bound and the gap, in words."""
        base = self.problem.keep_all_cost or 1.0
        bound = f"bound {self.bound / base - 1:+.2%}"
        if self.R is None:
            return f"no plan yet, {bound}"
        return f"step {self.cost / base - 1:+.2%}, {bound}, gap {self.gap:.2%}"

    def _text(self) -> str:
        """What a line has room for."""
        time_spent = f"{self.elapsed:.0f} of {self.time_limit:g} s"
        if self.R is None:
            return f"no plan yet, {time_spent}"
        return f"step {self.cost / (self.problem.keep_all_cost or 1.0) - 1:+.2%}, gap {self.gap:.2%}, {time_spent}"

    def _record(self, by: str) -> None:
        self.trajectory.append((self.elapsed, self.cost, min(self.bound, self.cost)))
        log.info("%s: %s after %s", by, self.describe(), format_seconds(self.elapsed))


def found(problem: Problem, budget: int, R: np.ndarray, by: str, *, verified: bool = False) -> None:
    """Report a schedule (T, T) within a budget; it counts where this problem is solved for this budget or a larger one.

    It is verified, which takes tens of milliseconds for a thousand ops, unless it is said to be so by construction.
    """
    progress = _current.get()
    if progress is not None and progress.problem is problem and budget <= progress.budget:
        progress.take(R, by, verified)


def proved(problem: Problem, budget: int, bound: float) -> None:
    """Report seconds that every schedule within the budget takes; they bound a smaller budget as well."""
    progress = _current.get()
    if progress is not None and progress.problem is problem and budget >= progress.budget:
        progress.raise_bound(bound)
