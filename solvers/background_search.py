"""Look for a first plan, and for a better one in another process, while the step runs by the best one yet.

The process is one of `checkmate.solvers.common.processes`, of low priority. It tells each plan that is notably better,
and keeps plans on disk like any. One runs at a time for each process that trains. If it fails, the step keeps its plan.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkmate.core.plan import Plan
from checkmate.core.solution import Query, Solution, Solver, Status
from checkmate.solvers.common.incumbent import Clock, Incumbent
from checkmate.solvers.common.processes import BackgroundProcess
from checkmate.solvers.plan_cache import WORTH_A_PROCESS, Record, is_better, store
from checkmate.solvers.solve import attempt
from checkmate.units import format_seconds

log = logging.getLogger("checkmate.solve")

LONGER = 5  # times as long is looked for a plan where none is found
TELL_SECONDS = 0.5  # between two looks at what the process has found


def first_plan(solver: Solver) -> Solver:
    """Look for a plan for as long as a query waits; while there is none, for longer, up to all of its seconds."""

    def first(query: Query) -> Solution:
        seconds = min(query.wait, query.seconds)
        while True:
            solution = solver(replace(query, seconds=seconds))
            if solution.status is not Status.NOT_FOUND or seconds >= min(query.patience, query.seconds):
                return solution
            seconds = LONGER * seconds if LONGER * seconds + WORTH_A_PROCESS <= query.seconds else query.seconds

    return first


@dataclass(frozen=True)
class News:
    """A message from the search process."""

    cost: float  # seconds of the step, of the best plan
    bound: float  # seconds, proven
    seconds: float  # spent
    plan: Plan | None = None  # notably better than earlier ones
    over: bool = False  # this is the last


class Search(BackgroundProcess):
    """A search in another process beside the training; its plans can be read at any time."""

    level, failed = logging.WARNING, "Planning beside the training has failed; the step keeps its plan. %s"

    def __init__(self, query: Query) -> None:
        # Another process gets no PyTorch objects, and a thread holds none as long as the search goes on.
        assert isinstance(query.start, Solution)
        problem = replace(query.problem, codegen=None, next_split=None)
        self.query = replace(query, problem=problem, start=replace(query.start, problem=problem, details={}))
        super().__init__(search, self.query)
        self.news = News(query.start.cost, query.start.bound, 0.0)  # the last
        self.better: News | None = None  # the last with a plan
        _searches.add(self)

    def start(self) -> None:
        """Start the process once no other search of this process runs."""
        self.start_after(_turn)

    @property
    def goes_on(self) -> bool:
        """Tell whether better plans may still come."""
        return not self.over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end of the search; tell whether it has ended."""
        return self.over.wait(timeout)

    def end(self) -> None:
        """Stop the search."""
        self.over.set()
        super().end()

    def hear(self, answer: News) -> bool:
        """Take a message of the process; tell whether it is the last."""
        self.news = answer
        if answer.plan is not None:
            self.better = answer
        if answer.over:
            spent = format_seconds(answer.seconds)
            log.info("planning has ended: step %.6g s, bound %.6g s, %s", answer.cost, answer.bound, spent)
        return answer.over


_searches: weakref.WeakSet[Search] = weakref.WeakSet()  # of this process
_turn = threading.Lock()


def _without_the_parents() -> None:
    """Forget the parent's searches in a forked child, which can neither hear nor end them."""
    global _turn
    _turn = threading.Lock()
    for search in list(_searches):
        search.process, search.over = None, threading.Event()
        search.over.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_without_the_parents)


def search(query: Query, tell: Callable[[News], None]) -> Solution:
    """Search for better plans, in the child, until the time is over or no notably better plan can exist.

    What is found is told at most each `TELL_SECONDS`, and at the end.
    """
    clock, watched, over = Clock(), list[Incumbent](), threading.Event()
    assert isinstance(query.start, Solution)
    start, told = query.start, query.start.cost

    def keep(solution: Solution, seconds: float) -> None:
        if query.cache:
            store(Record.of(solution, query.method, query.spent + seconds))

    # A thread tells of what the search knows.
    def look() -> None:
        nonlocal told
        while not over.wait(TELL_SECONDS):
            if not watched or watched[0].R is None:
                continue
            best, better = watched[0], None
            if is_better(best.cost, told):
                solution = best.now("auto")
                told, better = solution.cost, solution.plan
                keep(solution, clock.elapsed)
            tell(News(best.cost, min(best.bound, best.cost), clock.elapsed, better))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        answer = attempt(query, progress=False, watch=watched.append)
    finally:
        over.set()
        looking.join()
    if answer.schedule is None or answer.cost >= start.cost:  # it never is worse, but for what sums round
        answer = replace(start, bound=max(start.bound, min(answer.bound, start.cost)))
    keep(answer, query.seconds)
    better = answer.plan if is_better(answer.cost, told) else None
    tell(News(answer.cost, answer.bound, clock.elapsed, better, over=True))
    return answer
