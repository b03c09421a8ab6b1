"""The method "auto", several methods in turn: a usable plan almost at once, a bound, then what closes the gap.

    a known plan adapted, or next use
             -> exact search backwards, where the graph is tiny; detours from a plan that no pass has found
             -> bound of few moments -> next use guided by it -> bound of more moments -> guided again
             -> detours from the plan, backwards -> a bound by the search backwards -> tilted passes
             -> exact model on promising places -> exact model, where the graph is small
             -> more tilted passes, detours and windows of the places in turn

Each stage starts from the best plan so far and ends once the gap asked for is proven or its share of time is spent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from checkmate.core.solution import OPTIMAL_GAP, Solution
from checkmate.errors import SolverError
from checkmate.solvers.baselines.nothing_chosen import checkpoint_all
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.obey import obeys
from checkmate.solvers.common.runs import choose_places
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.host.offload import offload
from checkmate.solvers.linear.milp import milp
from checkmate.solvers.linear.moments import Bound, lifted_runs, moment_bound, next_moments
from checkmate.solvers.linear.places import restricted
from checkmate.solvers.search.adapt import Start, adapt, as_schedule, proven_by
from checkmate.solvers.search.backward_bound import WIDTHS, backward_bound
from checkmate.solvers.search.detours import Detours
from checkmate.solvers.search.drop_runs import slim
from checkmate.solvers.search.exchange import exchange
from checkmate.solvers.search.min_budget import TIME_LIMIT, ends_of, least_runs
from checkmate.solvers.search.next_use import Guide, next_use
from checkmate.solvers.search.tilting import Tilts

MOST_PLACES = 5000  # of the exact model on chosen places
MOST_OPS_EXACT = 150  # the exact model is of use up to here
MOST_OPS_AT_ONCE = 50  # and up to here the search backwards closes most gaps in a second
MOST_OPS_BACKWARD = 200  # where its bound is of use beside that of moments, close to the smallest budget
FEW_MOMENTS, MOST_MOMENTS = 2, 12  # of the first bound, which guides a plan, and of the second, which closes the gap
SHARE_OF_PASSES = 0.05  # of the time left, for the passes of next-use, guided or not
SHARE_OF_LEAST, SHARE_OF_SLIM = 0.5, 0.3  # of the time left, where no pass fits: the smallest budget, its plan improved
SHARE_OF_TILTS = 0.8  # of a search over tilts, the rest for exchanges
SHARE_OF_TURN, SHARE_OF_WINDOW = 0.15, 0.04  # of all the time: one search over tilts, one window
LEAST_WINDOW = 0.5  # seconds of one window, at least
OVER = 0.01  # of all the time: with less left no stage begins
ENOUGH = 0.5  # of the gap asked for: a plan that is so close to the bound ends the search on places
FINER_BOUND, FINER_PLACES = 0.2, 0.1  # of the gap asked for: what the models of bounds and of places are solved to
FIRST_WINDOW, WIDER = 0.15, 1.6  # share of the stages in the first windows, and how much wider the next ones are
log = logging.getLogger("checkmate.solve")


def auto(
    task: Task, incumbent: Incumbent, *, settle: float = 0.0, start: Start | None = None, without: Collection[str] = ()
) -> Remarks:
    """The best plan that the methods together find within the time limit, with the best bound.

    Args:
        settle: the gap that is worth all of the time limit. A smaller one is worth less, in proportion: with 0.01, a
            gap of 0.1% ends the search after a tenth of the time. 0: every gap is worth all of it.
        start: a known plan to begin with, of this problem or of one with the same ops and other sizes.
        without: names of `STAGES` to leave out, to see what each is worth.

    Raises:
        ValueError: if the start is of another graph, or there is no such stage.

    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[10, 20, 20, 5])
    >>> solve(chain, 50, without=["tilted"]).status
    Status.OPTIMAL
    """
    if unknown := [name for name in without if name not in {stage.name for stage in STAGES}]:
        raise ValueError(f"auto has no stage {unknown[0]!r}; its stages are {', '.join(s.name for s in STAGES)}.")
    known = None if start is None else as_schedule(task.problem, start).R
    if task.problem.host is not None:
        known_plan = start.plan if isinstance(start, Solution) else None
        return offload(task, incumbent, partial(auto, settle=settle, without=without), start=known_plan, settle=settle)
    if task.budget >= task.problem.keep_all_peak and not task.problem.limits.gone:
        return checkpoint_all(task, incumbent)
    if start is not None:
        incumbent.prove(proven_by(task.problem, task.budget, start))
    search = Portfolio(replace(task, gap=max(task.gap, OPTIMAL_GAP)), incumbent, settle, known)
    for stage in STAGES:
        if search.is_open and stage.name not in without:
            try:
                stage.run(search, search.task.within(stage.share * search.left))
            except SolverError as error:  # the other stages and the best plan so far are as good as before
                log.warning("%s failed: %s", stage.name, error)
                search.failed.append(str(error))
    details: dict[str, object] = {"found": incumbent.found} if incumbent.found else {}
    if search.failed:
        details["failed"] = search.failed
    return Remarks(details=details, stuck=search.stuck)


@dataclass
class Portfolio:
    """What the stages leave for one another, beside the incumbent."""

    task: Task
    incumbent: Incumbent
    settle: float
    known: np.ndarray | None  # runs of a plan to begin with, which may not fit
    relaxed: Bound | None = None
    stuck: int | None = None  # the op that no pass got beyond
    tilts: Tilts | None = None
    detours: Detours | None = None
    failed: list[str] = field(default_factory=list)  # what went wrong in a stage

    @property
    def left(self) -> float:
        """Seconds that are left, of what closing the gap is worth."""
        return self.worth * self.task.clock.limit - self.task.clock.elapsed

    @property
    def worth(self) -> float:
        """The share of the time limit that closing the gap is worth."""
        best = self.incumbent
        if best.R is None or not self.settle or best.cost - best.bound >= self.settle * best.cost:
            return 1.0
        return (best.cost - best.bound) / (self.settle * best.cost)

    @property
    def is_open(self) -> bool:
        """There is time, and something to gain."""
        best = self.incumbent
        if best.is_infeasible or self.left <= OVER * self.task.clock.limit:
            return False
        return best.R is None or best.cost - best.bound > self.task.gap * best.cost


def _known(search: Portfolio, task: Task) -> None:
    """The plan to begin with, as it is if that closes the gap, or adapted."""
    if search.known is None:
        return
    if obeys(task.problem, search.known):
        search.incumbent.offer(search.known, "start")
    if search.is_open and (R := adapt(task, search.known)) is not None:
        search.incumbent.offer(R, "start, adapted")


def _next_use(search: Portfolio, task: Task) -> None:
    """Passes of eviction; where none fits, the plan of the smallest peak."""
    if search.incumbent.R is not None:
        return
    search.stuck = next_use(task, search.incumbent).stuck
    if search.stuck is None:
        return
    problem, budget = task.problem, task.budget
    ends = ends_of(problem, time_limit=max(1.0, min(TIME_LIMIT, SHARE_OF_LEAST * search.left)))
    if budget < ends.bound:
        search.incumbent.prove(float("inf"))
    if budget >= ends.peak:
        clock = Clock(SHARE_OF_SLIM * search.left)
        search.incumbent.offer(slim(problem, budget, least_runs(problem, time_limit=0.0)[1], clock), "least")


def _detours_at_once(search: Portfolio, task: Task) -> None:
    """Where no pass fits, the plan of the smallest peak is far from good: bounds can wait."""
    if search.stuck is not None:
        _detours(search, task)


def _exact_at_once(search: Portfolio, task: Task) -> None:
    if len(task.problem.graph.ops) <= MOST_OPS_AT_ONCE:
        backward_bound(task, search.incumbent, widths=WIDTHS[-1:])


def _backward_bound(search: Portfolio, task: Task) -> None:
    """The bound of few states merged, and of more and more, where that is not hopeless."""
    if len(task.problem.graph.ops) <= MOST_OPS_BACKWARD:
        backward_bound(task, search.incumbent)


def _first_bound(search: Portfolio, task: Task) -> None:
    _bound(search, task, most=FEW_MOMENTS)


def _better_bound(search: Portfolio, task: Task) -> None:
    """More moments; one at a time, each answer tried as a guide, once the gap is worth less than all of the time."""
    step = MOST_MOMENTS if search.worth == 1.0 else 1
    while True:
        before = () if search.relaxed is None else search.relaxed.moments
        left = min(search.left, task.clock.left)
        _bound(search, task.within(left), most=min(MOST_MOMENTS, len(before) + step))
        if search.is_open:
            _guided(search, task.within(SHARE_OF_PASSES * search.left))
        same = search.relaxed is None or search.relaxed.moments == before
        if same or step > 1 or not search.is_open or task.clock.is_over:
            return


def _bound(search: Portfolio, task: Task, most: int) -> None:
    """More and more moments, from those of the last bound on."""
    known, problem = search.relaxed, task.problem
    moments = None
    if known is not None and known.moments:
        moments = next_moments(problem, task.budget, known, search.incumbent, most=most)

    def offer(R: np.ndarray) -> None:
        search.incumbent.offer(R, "bound")

    finer = replace(task, gap=FINER_BOUND * task.gap)
    found = moment_bound(finer, search.incumbent, moments=moments, most=most, on_runs=offer)
    search.relaxed = found if found.moments or known is None else known
    if found.moments and not found.infeasible:
        offer(lifted_runs(problem, found))


def _guide(search: Portfolio) -> Guide | None:
    """What the bound's answer keeps."""
    relaxed = search.relaxed
    if relaxed is None or not relaxed.moments:
        return None
    return Guide(tuple(zip(relaxed.moments, relaxed.kept, strict=True)))


def _guided(search: Portfolio, task: Task) -> None:
    """Passes that let go first of what the bound's answer does not keep."""
    guide = _guide(search)
    if guide is not None:
        next_use(task, search.incumbent, guide=guide)


def _places(search: Portfolio) -> np.ndarray:
    """Where ops may run again that do in the best plan or in the bound's answer."""
    problem, R, relaxed = search.task.problem, search.incumbent.R, search.relaxed
    again = set() if R is None else set(np.flatnonzero(R.sum(axis=0) > 1).tolist())
    if relaxed is not None and relaxed.moments:
        again |= set(np.flatnonzero(lifted_runs(problem, relaxed).sum(axis=0) > 1).tolist())
    return choose_places(problem, again, also=R, most=MOST_PLACES)


def _restricted(search: Portfolio, task: Task) -> None:
    """All candidates at once: closes the gap where few ops run again."""
    if search.incumbent.R is not None:
        _solve(search, task, _places(search), None)


def _solve(search: Portfolio, task: Task, places: np.ndarray, frozen: np.ndarray | None) -> None:
    """The exact model on these places, until half of the gap asked for is reached."""
    best, target = search.incumbent, search.incumbent.bound / (1 - ENOUGH * task.gap)
    restricted(replace(task, gap=FINER_PLACES * task.gap), best, places, frozen=frozen, target=target)


def _exact(search: Portfolio, task: Task) -> None:
    """The model of all places, where the graph is small."""
    if len(task.problem.graph.ops) <= MOST_OPS_EXACT:
        milp(task, search.incumbent)


def _tilted(search: Portfolio, task: Task) -> None:
    """Search over tilts for so long, from where it was left."""
    if search.tilts is None:
        search.tilts = Tilts(task, _guide(search))
    R = search.tilts.search(task.clock.share(SHARE_OF_TILTS))
    if R is not None:
        search.incumbent.offer(exchange(task, R), "tilted")


def _detours(search: Portfolio, task: Task) -> None:
    """Beams beside the best plan for so long, as wide as they were left."""
    best = search.incumbent
    if best.R is None:
        return
    if search.detours is None:
        search.detours = Detours(task)
    if not search.detours.is_over:
        best.offer(search.detours.search(best.R, task.clock), "detours")


def _in_turn(search: Portfolio, task: Task) -> None:
    """Tilted passes, detours and windows in turn, until the windows are as wide as can be and find nothing."""
    share: float | None = FIRST_WINDOW
    while search.is_open and share is not None:
        for part in (_tilted, _detours):
            if search.is_open:
                part(search, task.within(min(search.left, SHARE_OF_TURN * search.task.clock.limit)))
        if search.is_open:
            share = _windows(search, share)


def _windows(search: Portfolio, share: float) -> float | None:
    """Free the places of some stages at a time, window after window; the share for the next sweep, None at the end.

    That is a wider one after a sweep that found nothing.
    """
    if search.incumbent.R is None:
        return None
    before, places = search.incumbent.cost, _places(search)
    stages = np.unique(places[places[:, 0] != places[:, 1], 0])
    width = max(2, int(share * len(stages)))
    for begin in range(0, len(stages), max(1, width // 2)):
        if not search.is_open:
            return share
        frozen = ~np.isin(places[:, 0], stages[begin : begin + width])
        seconds = min(search.left, max(LEAST_WINDOW, SHARE_OF_WINDOW * search.task.clock.limit))
        _solve(search, search.task.within(seconds), places, frozen)
    if search.incumbent.cost < before * (1 - 1e-9):
        return share
    return None if share >= 1.0 else min(1.0, WIDER * share)


@dataclass(frozen=True)
class Stage:
    """A part of `auto`."""

    name: str
    run: Callable[[Portfolio, Task], None]  # the task has the stage's own clock
    share: float  # of the time that is left when its turn comes


STAGES = (
    Stage("known", _known, 0.1),
    Stage("next-use", _next_use, SHARE_OF_PASSES),
    Stage("exact at once", _exact_at_once, 0.3),
    Stage("detours at once", _detours_at_once, 0.5),
    Stage("first bound", _first_bound, 0.3),
    Stage("guided", _guided, SHARE_OF_PASSES),
    Stage("better bound", _better_bound, 0.4),
    Stage("detours", _detours, 0.3),
    Stage("backward bound", _backward_bound, 0.3),
    Stage("tilted", _tilted, 0.2),
    Stage("restricted", _restricted, 0.2),
    Stage("exact", _exact, 1.0),
    Stage("in turn", _in_turn, 1.0),
)
