"""The portfolio: a usable plan almost at once, then a bound, then what closes the gap between them.

    a known plan adapted, or next use
             -> exact model, where the graph is tiny
             -> bound of few moments -> next use guided by it -> bound of more moments -> guided again
             -> tilted passes -> exact model on promising places -> exact model, where the graph is small
             -> more tilted passes and windows of the places in turn

Each stage starts from the best plan so far and ends once the gap asked for is proven or its share of time is spent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status
from checkmate.errors import SolverError
from checkmate.solvers.baselines.checkpoint_all import checkpoint_all
from checkmate.solvers.common import incumbent as progress
from checkmate.solvers.common.certify import certify, contradicts, faults
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.runs import choose_places, cost_of, peak_of
from checkmate.solvers.linear.milp import milp
from checkmate.solvers.linear.moments import Bound, lift, moment_bound, next_moments
from checkmate.solvers.linear.places import restricted
from checkmate.solvers.search.adapt import Start, adapt, as_schedule, proven_by
from checkmate.solvers.search.drop_runs import slim
from checkmate.solvers.search.exchange import exchange
from checkmate.solvers.search.min_budget import TIME_LIMIT, least_runs, min_budget
from checkmate.solvers.search.next_use import Guide, next_use
from checkmate.solvers.search.tilting import Tilts

METHOD = "auto"
MOST_PLACES = 5000  # of the exact model on chosen places
MOST_OPS_EXACT = 150  # the exact model is of use up to here
MOST_OPS_AT_ONCE = 50  # and up to here proves more than any other bound in the same time
FEW_MOMENTS, MOST_MOMENTS = 2, 12  # of the first bound, which guides a plan, and of the second, which closes the gap
SHARE_OF_PASSES = 0.05  # of the time left, for the passes of next-use, guided or not
SHARE_OF_LEAST, SHARE_OF_SLIM = 0.5, 0.3  # of the time left, where no pass fits: the smallest budget, its plan improved
SHARE_OF_TILTS = 0.8  # of a search over tilts, the rest for exchanges
SHARE_OF_TURN, SHARE_OF_WINDOW = 0.15, 0.04  # of all the time: one search over tilts, one window
FIRST_WINDOW, WIDER = 0.15, 1.6  # share of the stages in the first windows, and how much wider the next ones are
log = logging.getLogger("checkmate.solve")


def auto(
    problem: Problem,
    budget: int,
    *,
    time_limit: float = 60.0,
    gap: float = 1e-4,
    settle: float = 0.0,
    threads: int = 1,
    seed: int = 0,
    start: Start | None = None,
    without: Collection[str] = (),
) -> Solution:
    """The best plan that the methods together find within the time limit, with the best bound.

    Args:
        gap: stop once (cost - bound) / cost is at most this.
        settle: the gap that is worth all of the time limit. A smaller one is worth less, in proportion: with 0.01, a
            gap of 0.1% ends the search after a tenth of the time. 0: every gap is worth all of it.
        threads: of the solver.
        seed: of what is drawn at random.
        start: a known plan to begin with, of this problem or of one with the same ops and other sizes.
        without: names of `STAGES` to leave out, to see what each is worth.

    Raises:
        ValueError: if the start is of another graph, or there is no such stage.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[10, 20, 20, 5])
    >>> auto(chain, 50, without=["tilted"]).status
    Status.OPTIMAL
    """
    if unknown := [name for name in without if name not in {stage.name for stage in STAGES}]:
        raise ValueError(f"auto has no stage {unknown[0]!r}; its stages are {', '.join(s.name for s in STAGES)}.")
    known = None if start is None else as_schedule(problem, start)
    if budget >= problem.keep_all_peak:
        return checkpoint_all(problem, budget)
    search = Portfolio(problem, budget, time_limit, gap, threads, seed, settle)
    if known is not None and start is not None:
        search.known, search.bound = known.R, max(search.bound, proven_by(problem, budget, start))
    for stage in STAGES:
        if search.is_open and stage.name not in without:
            try:
                stage.run(search, stage.share * search.left)
            except SolverError as error:  # the other stages and the best plan so far are as good as before
                log.warning("%s failed: %s", stage.name, error)
                search.failed.append(str(error))
    return search.solution()


class Portfolio:
    """The best plan and the best bound so far, and the time that is left."""

    def __init__(
        self,
        problem: Problem,
        budget: int,
        time_limit: float,
        gap: float,
        threads: int,
        seed: int,
        settle: float = 0.0,
    ) -> None:
        self.problem, self.budget, self.settle = problem, budget, settle
        self.time_limit, self.gap, self.threads, self.seed = time_limit, max(gap, OPTIMAL_GAP), threads, seed
        self.began = time.perf_counter()
        self.R: np.ndarray | None = None
        self.known: np.ndarray | None = None  # runs of a plan to begin with, which may not fit
        self.cost = float("inf")
        self.bound = problem.keep_all_cost
        self.relaxed: Bound | None = None
        self.infeasible = False
        self.stuck: int | None = None  # the op that no pass got beyond
        self.tilts: Tilts | None = None
        self.found: dict[str, float] = {}  # cost after each stage
        self.failed: list[str] = []  # what went wrong in a stage

    @property
    def left(self) -> float:
        """Seconds that are left, of what closing the gap is worth."""
        return self.worth * self.time_limit - (time.perf_counter() - self.began)

    @property
    def worth(self) -> float:
        """The share of the time limit that closing the gap is worth."""
        if self.R is None or not self.settle or self.cost - self.bound >= self.settle * self.cost:
            return 1.0
        return (self.cost - self.bound) / (self.settle * self.cost)

    @property
    def is_open(self) -> bool:
        """There is time, and something to gain."""
        if self.infeasible or self.left <= 0.01 * self.time_limit:
            return False
        return self.R is None or self.cost - self.bound > self.gap * self.cost

    def offer(self, R: np.ndarray | None, by: str) -> None:
        """Take a schedule that fits the budget, if it is better."""
        if R is None:
            return
        cost = cost_of(self.problem, R)
        if cost < self.cost:
            if wrong := faults(self.problem, self.budget, R):
                raise SolverError(f"The schedule of {by} is wrong: {wrong[0]}.")
            if contradicts(self.bound, cost):
                log.warning("a bound of %.6g s was wrong: a verified schedule takes %.6g s", self.bound, cost)
                self.bound = self.problem.keep_all_cost
            self.R, self.cost = R, cost
            self.found[by] = cost
            progress.found(self.problem, self.budget, R, by, verified=True)

    def prove(self, bound: float) -> None:
        """Take a lower bound, if it is better.

        Raises:
            SolverError: if a schedule that is known contradicts it.
        """
        if contradicts(bound, self.cost):
            raise SolverError(f"A bound of {bound:.6g} s is wrong: a verified schedule takes {self.cost:.6g} s.")
        self.bound = max(self.bound, bound)
        progress.proved(self.problem, self.budget, bound)

    def solution(self) -> Solution:
        """What came of it."""
        problem, budget = self.problem, self.budget
        seconds = time.perf_counter() - self.began
        if self.R is not None:
            details: dict[str, object] = {"found": self.found}
            if self.failed:
                details["failed"] = self.failed
            bound = min(self.bound, self.cost)
            return certify(problem, budget, self.R, method=METHOD, bound=bound, seconds=seconds, details=details)
        status = Status.INFEASIBLE if self.infeasible else Status.NOT_FOUND
        about: dict[str, Any] = {"details": {"failed": self.failed}} if self.failed else {}
        return Solution(status, problem, budget, METHOD, bound=self.bound, seconds=seconds, stuck=self.stuck, **about)


def _known(search: Portfolio, seconds: float) -> None:
    """The plan to begin with, as it is if that closes the gap, or adapted."""
    if search.known is None:
        return
    if peak_of(search.problem, search.known) <= search.budget:
        search.offer(search.known, "start")
    if search.is_open:
        until = time.perf_counter() + seconds
        R = adapt(search.problem, search.budget, search.known, deadline=until, seed=search.seed)
        search.offer(R, "start, adapted")


def _next_use(search: Portfolio, seconds: float) -> None:
    if search.R is not None:
        return
    found = next_use(search.problem, search.budget, time_limit=seconds, seed=search.seed)
    if found.schedule is not None:
        search.offer(found.schedule.R, "next-use")
        return
    search.stuck = found.stuck
    ends = min_budget(search.problem, time_limit=max(1.0, min(TIME_LIMIT, SHARE_OF_LEAST * search.left)))
    search.infeasible = search.budget < ends.bound
    if ends.peak <= search.budget:
        deadline = time.perf_counter() + SHARE_OF_SLIM * search.left
        search.offer(
            slim(search.problem, search.budget, least_runs(search.problem, time_limit=0.0)[1], deadline=deadline),
            "least",
        )


def _exact_at_once(search: Portfolio, seconds: float) -> None:
    if len(search.problem.graph.ops) <= MOST_OPS_AT_ONCE:
        _exact(search, seconds)


def _first_bound(search: Portfolio, seconds: float) -> None:
    _bound(search, seconds, most=FEW_MOMENTS)


def _better_bound(search: Portfolio, seconds: float) -> None:
    """More moments; one at a time, each answer tried as a guide, once the gap is worth less than all of the time."""
    step = MOST_MOMENTS if search.worth == 1.0 else 1
    until = time.perf_counter() + seconds
    while True:
        before = () if search.relaxed is None else search.relaxed.moments
        left = min(search.left, until - time.perf_counter())
        _bound(search, left, most=min(MOST_MOMENTS, len(before) + step))
        if search.is_open:
            _guided(search, SHARE_OF_PASSES * search.left)
        same = search.relaxed is None or search.relaxed.moments == before
        if same or step > 1 or not search.is_open or time.perf_counter() >= until:
            return


def _bound(search: Portfolio, limit: float, most: int) -> None:
    """More and more moments, from those of the last bound on."""
    start = None if search.R is None else Schedule.from_runs(search.problem.graph, search.R)
    known = search.relaxed
    found = moment_bound(
        search.problem,
        search.budget,
        moments=None if known is None or not known.moments else next_moments(search.problem, search.budget, known),
        start=start,
        gap=0.2 * search.gap,
        time_limit=limit,
        threads=search.threads,
        most=most,
    )
    search.prove(found.value)
    search.infeasible = found.infeasible
    search.relaxed = found if found.moments or known is None else known
    if found.moments and not found.infeasible:
        R = lift(search.problem, found).R
        if peak_of(search.problem, R) <= search.budget:
            search.offer(R, "bound")


def _guide(search: Portfolio) -> Guide | None:
    """What the bound's answer keeps."""
    relaxed = search.relaxed
    if relaxed is None or not relaxed.moments:
        return None
    return Guide(tuple(zip(relaxed.moments, relaxed.kept, strict=True)))


def _guided(search: Portfolio, seconds: float) -> None:
    guide = _guide(search)
    if guide is None:
        return
    found = next_use(search.problem, search.budget, time_limit=seconds, seed=search.seed, guide=guide)
    if found.schedule is not None:
        search.offer(found.schedule.R, "next-use, guided")


def _candidates(search: Portfolio) -> set[int]:
    """Ops that run again in the best plan or in the bound's answer."""
    again = set() if search.R is None else set(np.flatnonzero(search.R.sum(axis=0) > 1).tolist())
    relaxed = search.relaxed
    if relaxed is not None and relaxed.moments:
        again |= set(np.flatnonzero(lift(search.problem, relaxed).recomputed).tolist())
    return again


def _places(search: Portfolio) -> np.ndarray:
    return choose_places(search.problem, _candidates(search), also=search.R, most=MOST_PLACES)


def _restricted(search: Portfolio, seconds: float) -> None:
    """All candidates at once: closes the gap where few ops run again."""
    if search.R is not None:
        _solve(search, _places(search), None, seconds)


def _solve(search: Portfolio, places: np.ndarray, frozen: np.ndarray | None, limit: float) -> None:
    answer = restricted(
        search.problem,
        search.budget,
        places,
        start=search.R,
        frozen=frozen,
        time_limit=limit,
        gap=0.1 * search.gap,
        threads=search.threads,
        target=search.bound / (1 - 0.5 * search.gap),
    )
    search.offer(answer.R, "restricted" if frozen is None else "windows")


def _exact(search: Portfolio, seconds: float) -> None:
    if len(search.problem.graph.ops) > MOST_OPS_EXACT:
        return
    start = None if search.R is None else Schedule.from_runs(search.problem.graph, search.R)
    found = milp(search.problem, search.budget, time_limit=seconds, gap=search.gap, threads=search.threads, start=start)
    search.prove(found.bound)
    search.infeasible = found.status is Status.INFEASIBLE
    if found.schedule is not None:
        search.offer(found.schedule.R, "milp")


def _tilted(search: Portfolio, seconds: float) -> None:
    """Search over tilts for so long, from where it was left."""
    began = time.perf_counter()
    if search.tilts is None:
        tables = Tables.of(search.problem)
        search.tilts = Tilts(tables, search.budget, seed=search.seed, guide=_guide(search))
    R = search.tilts.search(deadline=began + SHARE_OF_TILTS * seconds)
    if R is not None:
        tables, until = search.tilts.tables, began + seconds
        search.offer(exchange(search.problem, tables, search.budget, R, deadline=until, seed=search.seed), "tilted")


def _in_turn(search: Portfolio, seconds: float) -> None:
    """Tilted passes and windows in turn, until the windows are as wide as can be and find nothing."""
    share: float | None = FIRST_WINDOW
    while search.is_open and share is not None:
        _tilted(search, min(search.left, SHARE_OF_TURN * search.time_limit))
        if search.is_open:
            share = _windows(search, share)


def _windows(search: Portfolio, share: float) -> float | None:
    """Free the places of some stages at a time, window after window; the share for the next sweep, None at the end.

    That is a wider one after a sweep that found nothing.
    """
    if search.R is None:
        return None
    before, places = search.cost, _places(search)
    stages = np.unique(places[places[:, 0] != places[:, 1], 0])
    width = max(2, int(share * len(stages)))
    for begin in range(0, len(stages), max(1, width // 2)):
        if not search.is_open:
            return share
        frozen = ~np.isin(places[:, 0], stages[begin : begin + width])
        _solve(search, places, frozen, min(search.left, max(0.5, SHARE_OF_WINDOW * search.time_limit)))
    if search.cost < before * (1 - 1e-9):
        return share
    return None if share >= 1.0 else min(1.0, WIDER * share)


@dataclass(frozen=True)
class Stage:
    """A part of `auto`."""

    name: str
    run: Callable[[Portfolio, float], None]  # for so many seconds, about
    share: float  # of the time that is left when its turn comes


STAGES = (
    Stage("known", _known, 0.1),
    Stage("next-use", _next_use, SHARE_OF_PASSES),
    Stage("exact at once", _exact_at_once, 1.0),
    Stage("first bound", _first_bound, 0.3),
    Stage("guided", _guided, SHARE_OF_PASSES),
    Stage("better bound", _better_bound, 0.4),
    Stage("tilted", _tilted, 0.2),
    Stage("restricted", _restricted, 0.2),
    Stage("exact", _exact, 1.0),
    Stage("in turn", _in_turn, 1.0),
)
