"""The method "auto", several methods in turn: a usable plan almost at once, a bound, then searches that close the gap.

    a known plan adapted, or passes of next use, or, where none fits, a plan of a small peak
    -> the search backwards, which is exact where the graph is tiny
    -> the bound of more and more moments, then plans that keep what its models keep
    -> all passes of next use and their local search, where they had no time to end
    -> passes guided by the bound, beside the best of some plans of a small peak, and their local search
    -> detours from the best plan, backwards
    -> neighbourhoods of the best plan, solved exactly
    -> the exact model, where the graph is small

Each stage starts from the best plan so far and ends once the gap asked for is proven or its share of time is spent.
On the main path, 10 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from checkmate.core.solution import OPTIMAL_GAP, Solution
from checkmate.errors import SolverError
from checkmate.solvers.baselines.checkpointing import checkpoint_all
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import Stages, as_matrix, cost_of, fits_budget, obeys_limits
from checkmate.solvers.host.offload import offload
from checkmate.solvers.linear.milp import milp
from checkmate.solvers.linear.moments import Bound, lifted_runs, moment_bound
from checkmate.solvers.search.adapt import Start, adapt, as_schedule, proven_by
from checkmate.solvers.search.backward_beam import backward_bound, detours
from checkmate.solvers.search.drop_runs import GuidedPasses, drop_runs
from checkmate.solvers.search.greedy import GRID, next_use
from checkmate.solvers.search.late_gradients import last_twice
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.min_budget import TIME_LIMIT, ends_of, least_plan, small_plan
from checkmate.solvers.search.neighbourhoods import search_around

NEXT_USE = 0.05  # of the time
SHORT = 10  # stages after which a gradient may run again in another plan of a small peak
WAYS = 2  # to let go of gradients that wait
SMALL = 0.05  # of the time: a plan of the smallest peak is quickly found, or not at all
ADAPT = 0.1  # of the time left: passes that keep what a relaxation keeps
PASSES, EXCHANGE = 0.25, 0.2  # of the time of guided passes, and of what is left of it for local search from each
OVER = 0.01  # of all the time: with less left no stage begins
FINER = 0.2  # of the gap asked for: what the models of bounds are solved to
log = logging.getLogger("checkmate.solve")


def auto(
    task: Task,
    incumbent: Incumbent,
    *,
    settle: float = 0.0,
    start: Start | None = None,
    patience: float = inf,
    enough: float = inf,
    without: Collection[str] = (),
) -> Remarks:
    """The best plan that the methods together find within the time limit, with the best bound.

    Args:
        settle: the gap that is worth all of the time limit. A smaller one is worth less, in proportion: with 0.01, a
            gap of 0.1% ends the search after a tenth of the time. 0: every gap is worth all of it.
        start: a known plan to begin with, of this problem or of one with the same ops and other sizes.
        patience: seconds after which it ends if there is no plan.
        enough: seconds after which it ends if there is one.
        without: names of `STAGES` to leave out, to see what each is worth.

    Raises:
        ValueError: if the start is of another graph, or there is no such stage.

    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[10, 20, 20, 5])
    >>> solve(chain, 50, without=["guided"]).status
    Status.OPTIMAL
    """
    # Refuse unknown stages; hand a second memory to `offload`; keep all if that fits.
    if unknown := [name for name in without if name not in {stage.name for stage in STAGES}]:
        raise ValueError(f"auto has no stage {unknown[0]!r}; its stages are {', '.join(s.name for s in STAGES)}.")
    known = None if start is None else as_schedule(task.problem, start).R
    if task.problem.host is not None:
        known_plan = start.plan if isinstance(start, Solution) else None
        alone = partial(auto, settle=settle, patience=patience, enough=enough, without=without)
        return offload(task, incumbent, alone, start=known_plan, settle=settle)
    if task.budget >= task.problem.keep_all_peak and not task.problem.limits.recomputed:
        return checkpoint_all(task, incumbent)
    # Take over the known plan with its bound.
    if start is not None:
        incumbent.prove(proven_by(task.problem, task.budget, start))
    if known is not None and obeys_limits(task.problem, known):
        incumbent.offer(known, "start")  # whether or not there is time left
    # The stages in turn, each with its share of the time left.
    search = Portfolio(replace(task, gap=max(task.gap, OPTIMAL_GAP)), incumbent, settle, known, patience, enough)
    for stage in STAGES:
        if search.is_open and stage.name not in without and len(task.problem.graph.ops) <= stage.most_ops:
            before = search.task.clock.elapsed
            try:
                stage.run(search, search.task.within(stage.share * search.left))
                log.debug("stage %s took %.1f s", stage.name, search.task.clock.elapsed - before)
            except SolverError as error:  # the other stages and the best plan so far are as good as before
                log.warning("%s failed: %s", stage.name, error)
                search.failed.append(str(error))
    details: dict[str, object] = {"found": incumbent.found, "failed": search.failed}
    return Remarks(details={name: what for name, what in details.items() if what}, stuck=search.stuck)


@dataclass
class Portfolio:
    """The state that the stages share, beside the incumbent."""

    task: Task
    incumbent: Incumbent
    settle: float
    known: np.ndarray | None  # runs of a plan to begin with, which may not fit
    patience: float = inf  # seconds to look for a first plan
    enough: float = inf  # seconds to look for a better one
    stuck: int | None = None  # the op that no pass got beyond
    is_cut_short: bool = False  # the first look by passes of next use, by the clock
    failed: list[str] = field(default_factory=list)  # errors of stages
    relaxed: list[Bound] = field(default_factory=list)  # what the models of more and more moments keep
    small: Stages | None = None  # the ops that run in each stage of a plan of a small peak
    guided: GuidedPasses | None = None  # beside such a plan

    @property
    def left(self) -> float:
        """Seconds left: up to ``patience`` without a plan, else up to ``enough``; the smaller the gap, the fewer."""
        seconds = self.incumbent.worth(self.settle) * self.task.clock.seconds
        most = self.patience if self.incumbent.R is None else self.enough
        return min(seconds, most) - self.task.clock.elapsed

    @property
    def is_open(self) -> bool:
        """Tell whether there is time left and a gap to close."""
        best = self.incumbent
        if best.is_infeasible or self.left <= OVER * min(self.task.clock.seconds, self.patience):
            return False
        return best.R is None or best.cost - best.bound > self.task.gap * best.cost


def _known(search: Portfolio, task: Task) -> None:
    if search.known is not None and (R := adapt(task, search.known)) is not None:
        search.incumbent.offer(R, "start, adapted")


def _next_use(search: Portfolio, task: Task) -> None:
    """Run eviction passes if there is no plan yet; ``patience`` limits the search for a first plan only."""
    if search.incumbent.R is None:
        whole = search.task.within(NEXT_USE * search.task.clock.left)
        remarks = next_use(whole, search.incumbent, patience=search.left / 2)
        search.stuck = remarks.stuck
        search.is_cut_short = whole.clock.is_over or remarks.details.get("passes", 0) < len(GRID)


def _all_passes(search: Portfolio, task: Task) -> None:
    """Run all passes with their local search, if the first look ended early: as good as the method "next-use"."""
    if search.is_cut_short:
        next_use(task, search.incumbent)


def _least(search: Portfolio, task: Task) -> None:
    """If no pass fits, drop runs of a plan of a small peak."""
    if search.incumbent.R is not None:
        return
    problem, budget, least = task.problem, task.budget, min(1.0, search.patience)
    runs = small_plan(problem, budget, Clock(max(least, SMALL * task.clock.left)))
    if runs is None:
        ends = ends_of(problem, time_limit=max(least, min(TIME_LIMIT, task.clock.left)))
        if budget < ends.bound:
            search.incumbent.prove(float("inf"))
        if budget < ends.peak:
            return
        runs = least_plan(problem, budget, Clock(0.0))
    search.small = runs
    search.incumbent.offer(drop_runs(problem, budget, runs, Clock(0.0)), "least")
    cheapest = GuidedPasses(task, runs).plain(Clock(NEXT_USE * search.left))
    if cheapest is not None:
        search.incumbent.offer(cheapest, "least")
        search.incumbent.offer(exchange(task.within(ADAPT * search.left), cheapest), "least")


def _bound(search: Portfolio, task: Task) -> None:
    """Prove the bound of more and more moments, and offer the plans that its models suggest."""
    offer = partial(search.incumbent.offer, by="bound")
    task = replace(task, gap=FINER * task.gap)
    moment_bound(task, search.incumbent, on_runs=offer, on_bound=search.relaxed.append)


def _adapted(search: Portfolio, task: Task) -> None:
    """Offer plans that keep what the models of the bound keep: of few moments or of many, which is best differs."""
    kept = {runs.tobytes(): runs for runs in (lifted_runs(task.problem, bound) for bound in search.relaxed)}
    for n, runs in enumerate(kept.values()):
        search.incumbent.offer(runs, "bound")
        adapted = adapt(search.task.within(task.clock.left / (len(kept) - n)), runs) if search.is_open else None
        if adapted is not None:
            search.incumbent.offer(adapted, "adapted")


def _small_plans(search: Portfolio, task: Task) -> None:
    """Choose the plan of a small peak that guided passes begin with, and offer what local search makes of each.

    Of a few such plans, in which gradients run again soon or late or not at all, it is the one whose cheapest pass,
    after local search, is the best.
    """
    problem, budget = task.problem, task.budget
    if search.small is None:
        search.small = small_plan(problem, budget, task.clock.share(SMALL))
    if search.small is None or not search.relaxed:
        return
    least, relaxed = inf, search.relaxed[-1]
    ways = [(None, None), (SHORT, None), *((None, homes) for homes in last_twice(problem)[:WAYS])]
    for n, (far, homes) in enumerate(ways):
        clock = task.clock.share(1 / (len(ways) - n))
        runs = small_plan(problem, budget, clock, far=far, homes=homes) if n else search.small
        passes = None if runs is None else GuidedPasses(search.task, runs, relaxed.moments, relaxed.parts)
        cheapest = None if passes is None else passes.plain(clock.share(0.5))
        if cheapest is not None:
            found = exchange(search.task.within(clock.left), cheapest)
            search.incumbent.offer(found, "guided")
            if (seconds := Tables.of(problem).seconds_of(found)) < least:
                search.guided, least = passes, seconds


def _guided(search: Portfolio, task: Task) -> None:
    """Continue the search over worths of values, improve its plans by local search, and look around the best of them.

    That one may be dearer than the best plan: which way local search goes is luck, and where it ends too.
    """
    if search.guided is None:
        return
    problem, fitting = task.problem, list[np.ndarray]()
    for runs in search.guided.search(task.clock.share(PASSES)):
        improved = exchange(task.within(EXCHANGE * task.clock.left), runs)
        search.incumbent.offer(improved, "guided")
        if fits_budget(problem, task.budget, R := as_matrix(improved)):  # out of order it may, a schedule not
            fitting.append(R)
    if fitting:
        R = min(fitting, key=partial(cost_of, problem))
        search.incumbent.offer(search_around(task, R), "guided")


def _detours(search: Portfolio, task: Task) -> None:
    """Search beside the best plan by beams."""
    if search.incumbent.R is not None:
        search.incumbent.offer(detours(task, search.incumbent.R), "detours")


def _neighbourhoods(search: Portfolio, task: Task) -> None:
    """Search around the best plan, then around the plan found there."""
    best = search.incumbent
    if best.R is not None and best.plan is not None and best.plan.is_a_schedule:
        best.offer(search_around(task, best.R), "neighbourhoods")


@dataclass(frozen=True)
class Stage:
    """A part of `auto`."""

    name: str
    run: Callable[[Portfolio, Task], object]  # the task has the stage's own clock
    share: float  # of the time that is left when its turn comes
    most_ops: float = float("inf")  # it is of no use for larger graphs


STAGES = (
    Stage("known", _known, 0.1),
    Stage("next-use", _next_use, NEXT_USE),
    Stage("least", _least, 0.5),
    # exact where no states are merged, as in most tiny graphs
    Stage("exact at once", lambda search, task: backward_bound(task, search.incumbent), 0.3, most_ops=50),
    Stage("bound", _bound, 0.3),
    Stage("adapted", _adapted, 0.3),
    Stage("all passes", _all_passes, 0.25),
    Stage("small plans", _small_plans, 0.5),
    Stage("guided", _guided, 0.4),
    Stage("detours", _detours, 0.4),
    Stage("neighbourhoods", _neighbourhoods, 0.6),
    Stage("exact", lambda search, task: milp(task, search.incumbent), 1.0, most_ops=150),
)
