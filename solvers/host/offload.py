"""Recompute, keep, or send away: plans for a step with a second memory.

    plans of recomputation alone -> the bound of moments with links, whose answer says what to send
    -> what is left to decide, as a problem of recomputation (`checkmate.solvers.host.away`)
    -> the transfers of its plan (`checkmate.solvers.host.placement`), whose seconds the simulator tells
    -> fewer values sent, or others, as long as that helps

The first plan is that of recomputation alone, so that a second memory never makes a step slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.schedule import Schedule
from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.host.away import away, events
from checkmate.solvers.host.placement import place
from checkmate.solvers.linear.moments import Bound, moment_bound

Solver = Callable[[Task, Incumbent], Remarks]
SHARE_OF_RECOMPUTATION, SHARE_OF_BOUND = 0.2, 0.5  # of the time, of what is left then
LEAST_TRY, SHARE_OF_TRY = 0.3, 0.04  # seconds of one set of values at least; of the time
SHARES = (1.0, 0.85, 0.7, 0.5, 0.3)  # of what the bound would send
MOST_MOMENTS = 10
log = logging.getLogger("checkmate.solve")


def offload(task: Task, incumbent: Incumbent, recompute: Solver) -> Remarks:
    """Plans and a bound for a problem with a second memory.

    Args:
        recompute: finds plans for a problem without one, and proves bounds, within the time of its task.
    """
    problem = task.problem
    alone = Incumbent(replace(task.within(SHARE_OF_RECOMPUTATION * task.clock.left), problem=problem.with_host(None)))
    remarks = recompute(alone.task, alone)
    if alone.R is not None:
        incumbent.offer(alone.R, "recomputation")
    if task.budget >= problem.keep_all_peak:
        return remarks
    search = Sets(task, incumbent, recompute)
    bound = moment_bound(task.within(SHARE_OF_BOUND * task.clock.left), incumbent, most=MOST_MOMENTS)
    for sent in _first_sets(task, bound):
        if not search.is_open:
            break
        search.attempt(sent)
    return Remarks(details={"found": incumbent.found})


@dataclass
class Sets:
    """Sets of values to send, and what came of them."""

    task: Task
    incumbent: Incumbent
    recompute: Solver
    tried: dict[tuple[frozenset[int], int], float] = field(default_factory=dict)  # -> seconds

    @property
    def is_open(self) -> bool:
        """There is time, and something to gain."""
        return not self.task.clock.is_over and self.incumbent.gap > self.task.gap

    def attempt(self, sent: Collection[int]) -> float:
        """The seconds of the best plan that sends these values, infinite without one; it is offered."""
        largest = max((int(self.task.problem.sizes[v]) for v in sent), default=0)
        return min(self._with_room(frozenset(sent), room) for room in (2 * largest, largest, 0))

    def _with_room(self, sent: frozenset[int], room: int) -> float:
        """The same with so many bytes left for what is on its way."""
        task = self.task
        if not sent or (sent, room) in self.tried or not self.is_open:
            return self.tried.get((sent, room), float("inf"))
        seconds = float("inf")
        plan = self._plan(sent, task.budget - room)
        if plan is not None:
            seconds = simulator.cost(plan, task.problem)
            self.incumbent.offer_plan(plan, f"{len(sent)} sent, {room} B room")
        self.tried[sent, room] = seconds
        log.info("sending %d values with room of %d bytes: %.6g s", len(sent), room, seconds)
        return seconds

    def _plan(self, sent: frozenset[int], budget: int) -> Plan | None:
        free = away(self.task.problem, sent)
        clock = Clock(min(self.task.clock.left, max(LEAST_TRY, SHARE_OF_TRY * self.task.clock.limit)))
        inner = Incumbent(replace(self.task, problem=free.problem, budget=budget, clock=clock, gap=1e-3))
        if budget < free.problem.unavoidable_bytes.max():
            return None
        try:
            self.recompute(inner.task, inner)
        except SolverError as error:
            log.warning("what to send was not found: %s", error)
        if inner.R is None:
            return None
        R, _, _ = inner.now()
        found = simulator.lower(free.problem, Schedule.from_runs(free.problem.graph, R))
        return place(self.task.problem, self.task.budget, *events(free, found))


def _first_sets(task: Task, bound: Bound) -> Iterator[list[int]]:
    """What the bound's answer sends, and parts of it: those that take longest to make again for their bytes."""
    problem = task.problem
    producers = [problem.graph.values[v].producer for v in bound.sent]
    worth = [problem.seconds[p] / max(1, int(problem.sizes[v])) for v, p in zip(bound.sent, producers, strict=True)]
    order = [bound.sent[i] for i in np.argsort(-np.array(worth), kind="stable")]
    for share in SHARES:
        yield order[: round(share * len(order))]
