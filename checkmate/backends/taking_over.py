"""A better plan takes over between two steps, while the step is trained.

Planning goes on in another process (`checkmate.solvers.background_search`). What it finds is verified and simulated
here like any plan, and takes over before a forward: not while a graph of the step waits for its backward, and not while
gradients are accumulated, which shows in parameters that have gradients and were not written to since the last forward.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from checkmate.backends.step_problem import with_asked
from checkmate.codegen.replaceable_code import ReplaceableCode
from checkmate.core.plan import Plan
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status
from checkmate.errors import SolverError
from checkmate.solvers.background_search import Search
from checkmate.solvers.common.incumbent import certify, contradicts
from checkmate.solvers.plan_cache import UnfinishedSearch
from checkmate.statusline import showing
from checkmate.units import format_seconds

log = logging.getLogger("checkmate.solve")
Write = Callable[[Solution], tuple[Any, Any] | None]


@dataclass(frozen=True)
class Planning:
    """The state of the plan of one captured graph."""

    cost: float  # seconds of the step, of the best plan that is known; it may not have taken over yet
    bound: float  # seconds that every schedule takes, proven
    seconds: float  # that planning took so far
    goes_on: bool  # a better plan may still come
    swaps: int  # how often a plan has taken over
    failure: str = ""  # why planning has ended early, if it failed

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: at most this share of the step could still be saved."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost > 0 else 0.0

    def __str__(self) -> str:
        ends = "goes on" if self.goes_on else self.failure or "has ended"
        return f"step {format_seconds(self.cost)}, gap {self.gap:.2%} after {format_seconds(self.seconds)}; {ends}"


class Running:
    """A captured graph, and the plan by which it runs now, which may yet change.

    Its code is asked for by ``around`` before each call. A plan that was found takes over then, unless a graph of the
    step is alive or gradients are accumulated; once planning has ended, and all that it found has been looked at, no
    other can.
    """

    def __init__(self, plan: Solution) -> None:
        self.plan, self.swaps = plan, 0
        self._search: Search | None = None  # None: nothing is open
        self._write: Write | None = None  # None: no plan can take over

    def go_on(self, unfinished: UnfinishedSearch, code: ReplaceableCode, write: Write, *, asked: int = 0) -> None:
        """Begin to look for better plans, which run in place of the first one's ``code``.

        ``write`` makes of a plan the functions of its forward and backward; None if these do not fit what AOTAutograd
        was told of the first. ``asked``: bytes that it takes, beside what is resident, to ask what the step asks.
        """
        self._began, self._code, self._write, self._asked = self.plan.seconds, code, write, asked
        self._tried: Any = None  # the last news that were looked at
        self._versions = -1  # of all parameters together, at the last forward
        self._looking = threading.Lock()
        self._search = Search(unfinished)
        weakref.finalize(self, self._search.end)
        self._search.start()

    def end(self) -> None:
        """End planning now."""
        if self._search is not None:
            self._search.end()

    @property
    def known(self) -> Planning:
        """The present state."""
        plan, search = self.plan, self._search
        if search is None:
            return Planning(plan.cost, plan.bound, plan.seconds, goes_on=False, swaps=0)
        news = search.news
        cost, bound = min(news.cost, plan.cost), max(news.bound, plan.bound)
        spent = self._began + news.seconds
        return Planning(cost, min(bound, cost), spent, search.goes_on, self.swaps, search.failure)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until planning has ended, ``timeout`` seconds at most, and tell whether it has."""
        if self._search is None:
            return True
        with showing(lambda: f"planning: {self.known}"):
            return self._search.wait(timeout)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled function so that a better plan may take over before each call."""

        @wraps(run)
        def changing(*args: Any) -> Any:
            if self._write is not None and self._looking.acquire(blocking=False):  # else another thread does
                try:
                    self._before(args)
                finally:
                    self._looking.release()
            return run(*args)

        return changing

    def _before(self, args: Sequence[Any]) -> None:
        """Before each forward, install a better plan if no backward is pending and no gradient accumulates."""
        assert self._search is not None
        over, news = not self._search.goes_on, self._search.better
        leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        before, self._versions = self._versions, sum(t._version for t in leaves)
        if news is not None and news is not self._tried:
            accumulating = self._versions == before and any(t.grad is not None for t in leaves)
            if accumulating or self._code.pending:
                return
            self._tried = news
            assert news.plan is not None
            self._take_over(news.plan, news.bound, news.seconds)
        elif over:
            self._close()

    def _take_over(self, plan: Plan, bound: float, seconds: float) -> None:
        """Run by another plan from now on. Whatever is wrong with it is no reason to end a training."""
        problem, budget, began = self.plan.problem, self.plan.budget, time.perf_counter()
        about: dict[str, Any] = {"seconds": self._began + seconds, "origin": "beside the training"}
        try:
            found = certify(problem, budget, plan, method=self.plan.method, bound=bound, **about)
            found = with_asked(found, self._asked)
            assert self._write is not None
            code = self._write(found)
        except SolverError as error:
            log.warning("A plan that was found beside the training cannot take over: %s", error)
            return
        if code is None:
            log.info("a plan that was found beside the training does not fit the captured graph")
            return
        self._code.take_over(*code)
        self.plan, self.swaps = found, self.swaps + 1
        log.info("a better plan took over, within %s: %s", format_seconds(time.perf_counter() - began), found)

    def _close(self) -> None:
        """Let go of the search: it has ended, and its best plan has taken over."""
        known = self.known
        if not contradicts(known.bound, self.plan.cost) and known.bound > self.plan.bound:
            closed = self.plan.cost - known.bound <= OPTIMAL_GAP * self.plan.cost
            status = Status.OPTIMAL if closed else self.plan.status
            self.plan = replace(self.plan, bound=known.bound, seconds=known.seconds, status=status)
        self._write = None
