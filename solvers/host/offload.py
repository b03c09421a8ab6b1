"""Recompute, keep or send: plans for a step with a second memory.

    plans of recomputation alone
    -> the bound of moments with links (`checkmate.solvers.linear.moments`), whose answer says what to send
    -> what is left to decide then, as a problem of recomputation (`checkmate.solvers.common.fetches`)
    -> the transfers of its plan (`checkmate.solvers.common.fetches`), whose seconds the simulator tells
    -> more moments, other sets: without what is waited for, with what runs again for long

The first plan is that of recomputation alone, so that a second memory never makes a step slower. Where values are at
home in the second memory, it is one that sends nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.timing import timing
from checkmate.errors import SolverError
from checkmate.solvers.common.fetches import place_transfers, plain_events, sendable, with_fetches
from checkmate.solvers.common.incumbent import Clock, Incumbent, Remarks, Solver, Task
from checkmate.solvers.common.schedules import lowered
from checkmate.solvers.linear.moments import Bound, in_windows, moment_bound, next_moments
from checkmate.solvers.search.min_budget import with_most_sent

SHARE_OF_RECOMPUTATION, SHARE_OF_BOUND = 0.2, 0.25  # of the time; of what is left then, for each of several
SHARE_OF_LEAST = 0.5  # of what is left, for the smallest budget where no other plan fits
LEAST_SECONDS = 1.0  # for that at least, however little is left: a budget that `min_budget` names has a plan
LEAST_TRY, SHARE_OF_TRY = 0.3, 0.04  # seconds of one set of values at least; of the time
PROOF = 3.0  # seconds in which a plan of 4,000 ops is mostly proven: beside homes, up to five times that share
MOMENTS = (1, 2, 4, 8, 12)  # at most, of one bound after another
MOST_WITH_HOMES = 2  # windows of the backward: a linear program of more moments proves less
SHARES = (1.0, 0.85, 0.7, 0.5)  # of what the bound would send
ROOMS = (2.0, 1.0, 0.0)  # times the largest value that is sent: what is left free for transfers
ROOMS_BESIDE_HOMES = (3.0, 2.0, 1.0, 0.0)
FAR = 0.02  # of the best plan's seconds: parts of a set that are farther off are not tried with all rooms
STEPS = (4, 1, 16, 2, 8, 32)  # values that a set has more or less than the best
AT_RANDOM, MOST_AT_RANDOM = 20, 4  # sets tried before others are looked at once more; values by which they differ
log = logging.getLogger("checkmate.solve")


def offload(
    task: Task, incumbent: Incumbent, recompute: Solver, *, start: Plan | None = None, settle: float = 0.0
) -> Remarks:
    """Plans and a bound for a problem with a second memory.

    Args:
        recompute: finds plans for a problem without one, and proves bounds, within the time of its task.
        start: a known plan, which may not fit.
        settle: the gap that is worth all of the time; a smaller one is worth less, in proportion.
    """
    problem = task.problem
    # Plans that send nothing, and a known one.
    if start is not None and not simulator.check_plan(start, problem, task.budget):
        incumbent.offer(start, "start")
    sets = SentSets(task, incumbent, recompute, settle)
    if problem.homes:
        sets.attempt((), enough=True)
    else:
        alone = Incumbent(task.within(SHARE_OF_RECOMPUTATION * task.clock.left, problem=problem.with_host(None)))
        remarks = recompute(alone.task, alone)
        if alone.R is not None:
            incumbent.offer(alone.R, "recomputation")
        if task.budget >= problem.keep_all_peak:
            return remarks
    # A first plan that sends: all that may go, or that of the smallest peak.
    if incumbent.R is None:
        sets.attempt(sendable(problem))
    if incumbent.R is None:
        _, least = with_most_sent(problem, time_limit=max(LEAST_SECONDS, SHARE_OF_LEAST * task.clock.left))
        if least is not None:
            sets.offer(least, 0)
    # Bounds of more and more moments; what their models send is tried.
    bound: Bound | None = None
    for most in MOMENTS:
        if not sets.is_open or (problem.homes and most > MOST_WITH_HOMES):
            break
        at = None if bound is None else next_moments(problem, task.budget, bound, incumbent, most=most)
        at = in_windows(problem, most) if problem.homes else at
        if bound is not None and (bound.infeasible or at == list(bound.moments)):
            break
        limited = task.within(SHARE_OF_BOUND * task.clock.left)
        bound = moment_bound(limited, incumbent, moments=at, most=len(at) if at else most)
        sets.attempt_parts(bound.sent)
    sets.improve()
    return Remarks(details={"found": incumbent.found})


@dataclass(frozen=True)
class TriedSet:
    """The result of sending a set of values, with some bytes left free for transfers."""

    seconds: float
    sent: frozenset[int]
    room: int  # bytes
    plan: Plan


@dataclass
class SentSets:
    """The sets of values to send that were tried, with their results."""

    task: Task
    incumbent: Incumbent
    recompute: Solver
    settle: float = 0.0
    best: TriedSet | None = None
    tried: dict[tuple[frozenset[int], int], float] = field(default_factory=dict)  # -> seconds

    @property
    def is_open(self) -> bool:
        """Tell whether there is time left and a gap to close."""
        best, clock = self.incumbent, self.task.clock
        over = best.is_infeasible or clock.elapsed >= best.worth(self.settle) * clock.seconds
        return not over and (best.R is None or best.gap > self.task.gap)

    def attempt_parts(self, sent: Collection[int]) -> None:
        """Try a set, as large as has room beside homes, and subsets: the values dearest to remake for their bytes."""
        order = sorted(sent, key=lambda v: -_worth(self.task.problem, v))
        if (problem := self.task.problem).homes and problem.host is not None:
            order = order[: int((np.cumsum(problem.sizes[order]) <= problem.host.budget - problem.homes_bytes).sum())]
        for share in SHARES:
            self.attempt(order[: round(share * len(order))])

    def attempt(self, sent: Collection[int], *, enough: bool = False) -> None:
        """Offer plans that send these values, with more or less room left for transfers; one of them is `enough`."""
        moved, least = {*sent, *self.task.problem.homes}, float("inf")
        largest = max((int(self.task.problem.sizes[v]) for v in moved), default=0)
        for times in ROOMS_BESIDE_HOMES if self.task.problem.homes else ROOMS:
            least = min(least, self.with_room(sent, round(times * largest)))
            if self.best is not None and (enough or least > (1 + FAR) * self.best.seconds):
                break

    def with_room(self, sent: Collection[int], room: int) -> float:
        """Try a set with this many bytes left free for transfers."""
        task, key = self.task, (frozenset(sent), room)
        if key in self.tried or not (sent or task.problem.homes) or not self.is_open:
            return self.tried.get(key, float("inf"))
        # Find a plan soon that sends these values and keeps the others within the budget.
        fetching, plan = with_fetches(task.problem, key[0]), None
        if task.budget - room >= fetching.problem.unavoidable_bytes.max():
            share = SHARE_OF_TRY * task.clock.seconds
            share = max(LEAST_TRY, share, min(PROOF, 5 * share) if task.problem.homes else 0.0)
            clock = Clock(min(task.clock.left, share))
            inner = Incumbent(replace(task, problem=fetching.problem, budget=task.budget - room, clock=clock, gap=1e-3))
            try:
                self.recompute(inner.task, inner)
            except SolverError as error:
                log.warning("what to do beside transfers was not found: %s", error)
            if inner.R is not None:
                events = plain_events(fetching, lowered(fetching.problem, inner.R))
                plan = place_transfers(task.problem, task.budget, *events)
        self.tried[key] = float("inf") if plan is None else self.offer(plan, room)
        log.info("sending %d values with room for %d bytes: %.6g s", len(sent), room, self.tried[key])
        return self.tried[key]

    def offer(self, plan: Plan, room: int) -> float:
        """Offer a plan; give its seconds."""
        problem = self.task.problem
        seconds, host_peak = simulator.cost(plan, problem), simulator.simulate(plan, problem).host_peak
        self.incumbent.offer(plan, "sending")
        fits = problem.host is not None and host_peak <= problem.host.budget
        if fits and plan.moves and (self.best is None or seconds < self.best.seconds):
            self.best = TriedSet(seconds, plan.sent - problem.homes, room, plan)
        return seconds

    def improve(self) -> None:
        """Try neighbours of the best set until the time is over; if none is better, also random ones."""
        rng = np.random.default_rng(self.task.seed)
        while self.best is not None and self.is_open:
            before, tried = self.best, len(self.tried)
            for sent, room in self._beside(before, rng):
                self.with_room(sent, room)
                if self.best is not before or not self.is_open:
                    break
            if self.best is before and len(self.tried) == tried:
                return

    def _beside(self, best: TriedSet, rng: np.random.Generator) -> Iterator[tuple[frozenset[int], int]]:
        """Neighbours: fewer values that stall ops or are cheap to remake, more values that are dear to remake.

        Then others at random.
        """
        problem, graph, may = self.task.problem, self.task.problem.graph, sendable(self.task.problem)
        # Values whose transfers ops wait for, the longest first.
        waits: dict[int, float] = {}
        for position, stall in timing(best.plan, problem).stalls:
            v = best.plan.steps[position].value  # type: ignore[union-attr]  # of a Wait
            waits[v] = waits.get(v, 0.0) + stall
        late = sorted(waits, key=lambda v: -waits[v])
        # Sent values, and unsent ones whose ops rerun, by seconds per byte to remake them.
        cheap = sorted(best.sent, key=lambda v: _worth(problem, v))
        times = np.bincount(best.plan.runs, minlength=len(graph.ops))
        dear = [v for v in may if times[graph.values[v].producer] > 1 and v not in best.sent]
        dear.sort(key=lambda v: -_worth(problem, v))
        largest = max((int(problem.sizes[v]) for v in best.plan.moved), default=0)
        for n in STEPS:
            yield best.sent.difference(late[:n]), best.room
            yield best.sent.union(dear[:n]), best.room
            yield best.sent.difference(late[:n]).union(dear[:n]), best.room
            yield best.sent.difference(cheap[:n]).union(dear[:n]), best.room
            yield best.sent, max(0, best.room + largest * (1 if n % 3 == 1 else -1) // max(1, n // 2))
        for _ in range(AT_RANDOM if may else 0):
            n = int(rng.integers(1, min(MOST_AT_RANDOM, len(may)) + 1))
            yield best.sent.symmetric_difference(rng.choice(may, n, replace=False).tolist()), best.room


def _worth(problem: Problem, v: int) -> float:
    """Seconds per byte of the op that makes a value."""
    producer = problem.graph.values[v].producer
    assert producer is not None
    return float(problem.seconds[producer]) / max(1, int(problem.sizes[v]))
