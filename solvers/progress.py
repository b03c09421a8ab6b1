"""What a running solve knows so far: the best plan, the best bound, how both came about, and a line that shows it.

Methods write here as they go (`found`, `proved`), from however deep inside; whoever solves reads. So a solve that is
interrupted, or one of whose solvers fails, still has its best plan, and a person at a terminal sees the gap close.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import numpy as np

from checkmate.problem import Problem
from checkmate.solution import Solution
from checkmate.solvers.certify import certify, contradicts, faults
from checkmate.units import format_seconds

QUIET_SECONDS = 2.0  # a shorter solve shows nothing unless it is asked to
REFRESH_SECONDS = 0.2
NOTABLE = 1e-4  # a bound that rises by a smaller share is not worth a line: solvers report hundreds of them
log = logging.getLogger("checkmate.solve")
_current: ContextVar[Progress | None] = ContextVar("checkmate_progress", default=None)


class Progress:
    """The best plan and bound of one solve. As a context manager it is the one that `found` and `proved` write to.

    Args:
        problem: what is solved.
        budget: bytes.
        time_limit: seconds, for the line.
        shown: show a line on standard error; None: on a terminal only, after `QUIET_SECONDS`.

    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> with Progress(problem, budget=8, time_limit=1.0) as progress:
    ...     found(problem, 8, np.eye(2, dtype=bool), "by hand")
    >>> progress.cost, progress.bound
    (2.0, 2.0)
    """

    def __init__(self, problem: Problem, budget: int, time_limit: float, shown: bool | None = None) -> None:
        self.problem, self.budget, self.time_limit = problem, budget, time_limit
        self.shown = shown
        self.began = time.perf_counter()
        self.R: np.ndarray | None = None
        self.cost = float("inf")
        self.bound = problem.keep_all_cost
        self.trajectory: list[tuple[float, float, float]] = []  # (seconds, cost, bound) at each notable change
        self._lock = threading.Lock()  # solvers report from threads of their own
        self._line: _Line | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the solve began."""
        return time.perf_counter() - self.began

    def __enter__(self) -> Progress:
        self._token = _current.set(self)
        if self.shown or (self.shown is None and sys.stderr.isatty()):
            self._line = _Line(self, delay=0.0 if self.shown else QUIET_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _current.reset(self._token)
        if self._line is not None:
            self._line.close()

    def take(self, R: np.ndarray, by: str, verified: bool = False) -> None:
        """Keep a schedule (T, T) if it is cheaper than the best so far and the verifier has nothing against it."""
        cost = float(R.sum(axis=0) @ self.problem.seconds)
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
        gap = max(0.0, 1 - self.bound / self.cost) if self.cost else 0.0
        return f"step {self.cost / base - 1:+.2%}, {bound}, gap {gap:.2%}"

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


class _Line:
    """A bar of the time spent with what is known, redrawn by a thread: solvers are silent for seconds at a time."""

    def __init__(self, progress: Progress, delay: float) -> None:
        self._progress, self._delay = progress, delay
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="checkmate-progress", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        if self._over.wait(self._delay):
            return
        from tqdm.auto import tqdm  # here, so that only those who see a bar pay for its import

        progress = self._progress
        layout = "{desc} |{bar:20}| {postfix}"
        with tqdm(total=progress.time_limit, bar_format=layout, desc="checkmate", leave=False, file=sys.stderr) as bar:
            while True:
                over = self._over.wait(REFRESH_SECONDS)
                bar.n = min(progress.elapsed, progress.time_limit)
                time_spent = f"{progress.elapsed:.0f} of {progress.time_limit:g} s"
                bar.set_postfix_str(f"{progress.describe()}, {time_spent}")
                if over:
                    return

    def close(self) -> None:
        """Take the line away."""
        self._over.set()
        self._thread.join()
