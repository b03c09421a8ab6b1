"""Plans for steps of which links carry some ops, such as collectives, while the processor runs others.

A step takes at least the seconds of all that the processor runs, and of all that each link carries. So for any shares
of one, w of the processor and w_l of each link,

    seconds >= sum over runs of w(k) C_k        w(k) = w of what carries op k

and the least of the right side over all schedules is a bound: it is that of the same step whose ops take w(k) C_k,
which any method for recomputation finds. The shares that prove the most make the processor and its busiest link take
the same time, where that is possible; they are looked for by halving. The processor runs nothing beside the first
gather, or beside the last sum over ranks: these seconds count on top of its own (`Exposed`).

The schedules that come with it are lowered, and what links carry is started early and waited for late
(`checkmate.solvers.common.place_starts`). For that to have room, some are made for less than the budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import numpy as np

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.place_starts import place_starts
from checkmate.solvers.common.runs import lowered
from checkmate.solvers.common.task import Task

Solver = Callable[[Task, Incumbent], Remarks]
LEAST = 1e-4  # share of a link's seconds where the processor takes longer: of equal plans the one with less on links
SHARE = 0.3  # of what is left of the time, for one search
HALVINGS = 6  # of the share of the busiest link
SHARES = (0.5, 0.2)  # more of them: of one half, plans are those of a step in which nothing overlaps
ROOMS = (0, 1, 2, 4, 8, 16, 32)  # ops of links, of the usual bytes: what plans leave free for them
log = logging.getLogger("checkmate.solve")


def overlap(task: Task, incumbent: Incumbent, recompute: Solver, *, proves: bool) -> Remarks:
    """Plans, and a bound, for a problem whose graph has links.

    Args:
        recompute: finds plans for a problem without links, within the time of its task.
        proves: whether it proves bounds, too, so that more time is of use.
    """
    if task.problem.host is not None:  # both at once is not planned: links wait, and nothing more is proven
        inner = Incumbent(replace(task, problem=replace(task.problem, graph=task.problem.graph.without_links())))
        remarks = recompute(inner.task, inner)
        if inner.R is not None:
            incumbent.offer_plan(inner.plan if inner.plan is not None else lowered(task.problem, inner.R), "links wait")
        return remarks
    search = _Search(task, incumbent, recompute)
    incumbent.prove(search.exposed.bound)
    remarks = search.attempt(LEAST)
    share, low, high = LEAST, 0.0, 1.0  # between shares with which the processor, and the link, takes longer
    for _ in range(HALVINGS if proves and search.balance > 0 else 0):
        low, high = (share, high) if search.balance > 0 else (low, share)
        share = (low + high) / 2
        search.attempt(share)
    for room in ROOMS if proves else ():
        for one in dict.fromkeys((share, *SHARES)):
            search.attempt(one, room)
    return remarks


class _Search:
    """What was tried."""

    def __init__(self, task: Task, incumbent: Incumbent, recompute: Solver) -> None:
        self.task, self.incumbent, self.recompute = task, incumbent, recompute
        problem = task.problem
        links = problem.graph.links
        self.busiest = max(links, key=lambda name: float(problem.seconds[[*links[name]]].sum()))
        made = [int(problem.sizes[[*problem.graph.ops[k].outputs]].sum()) for ops in links.values() for k in ops]
        self.usual = _usual(made)
        self.exposed = Exposed.of(problem)
        self.balance = 0.0  # seconds of the busiest link beyond the processor's, in the last plan
        self.tried: set[tuple[float, int]] = set()

    @property
    def is_open(self) -> bool:
        """There is time, and something to gain."""
        best = self.incumbent
        return not (best.is_infeasible or self.task.clock.is_over or best.gap <= self.task.gap)

    def attempt(self, share: float, room: int = 0) -> Remarks:
        """Solve the step with this share of the busiest link and the others' least, with room left for so many ops."""
        problem, budget = self.task.problem, self.task.budget - room * self.usual
        too_little = budget < problem.unavoidable_bytes.max()
        if (share, room) in self.tried or too_little or (self.tried and not self.is_open):
            return Remarks()
        self.tried.add((share, room))
        shares = _shares(problem, self.busiest, share)
        seconds = problem.seconds * [shares[op.link] for op in problem.graph.ops]
        weighted = replace(_without_links(problem), profile=replace(problem.profile, seconds=seconds))
        inner = Incumbent(replace(self.task.within(SHARE * self.task.clock.left), problem=weighted, budget=budget))
        try:
            return self.recompute(inner.task, inner)
        finally:  # an interruption loses nothing
            if not room:
                self.incumbent.prove(inner.bound + shares[""] * self.exposed.seconds)
            if inner.R is not None:
                self._offer(inner.plan if inner.plan is not None else lowered(problem, inner.R), share)

    def _offer(self, plan: Plan, share: float) -> None:
        problem = self.task.problem
        self.incumbent.offer_plan(place_starts(problem, self.task.budget, plan), f"overlap at {share:.2g}")
        times = np.bincount(plan.runs, minlength=len(problem.graph.ops)) * problem.seconds
        on_link = times[[*problem.graph.links[self.busiest]]].sum()
        of_processor = times[[not op.link for op in problem.graph.ops]].sum()
        self.balance = float(on_link - of_processor)
        log.info("share %.3g: %.4g s of the processor, %.4g of the busiest link", share, of_processor, on_link)


def _usual(sizes: list[int]) -> int:
    """Half of all bytes are of what is as large or larger.

    >>> _usual([1, 1, 1, 8, 8, 8, 20])
    8
    """
    most, so_far = sum(sizes), 0
    for size in sorted(sizes, reverse=True):
        so_far += size
        if 2 * so_far >= most:
            return size
    return 0


@dataclass(frozen=True)
class Exposed:
    """What holds for every plan since ops wait for one another.

    When a processor's op runs for the first time, its link has carried all that this op and those before it are made
    from; and what is made from an op is carried after it.
    """

    bound: float  # seconds of the step at least, by what runs once
    seconds: float  # in which the processor runs nothing, before its first op and after its last one

    @classmethod
    def of(cls, problem: Problem) -> Exposed:
        """Those of a problem whose graph has links.

        The processor's last run that takes time is its last op's, or makes something again that is read: else it could
        be left out. So after it a link carries at least what is made from the last op, or the shortest of all ops that
        read what the processor makes; or nothing, if an op that takes no time comes later and reads such a value.
        """
        graph, seconds = problem.graph, problem.seconds.tolist()
        carries = [sum(1 << k for k in ops) for ops in graph.links.values()]  # ops as bits of an integer, as below
        before: list[int] = []  # of each op, those that it is made from
        for deps in graph.deps:
            before.append(reduce(or_, (1 << j | before[j] for j in deps), 0))
        own = [k for k, op in enumerate(graph.ops) if not op.link and seconds[k]]
        if not own:
            return cls(problem.least_cost, 0.0)
        now, done = 0.0, 0
        ready, ends, carried = list[float](), list[float](), [0.0] * len(carries)
        for k in own:
            for i, of_link in enumerate(carries):
                carried[i] += sum(seconds[j] for j in _bits(before[k] & of_link & ~done))
            done |= before[k]
            ready.append(max(carried))
            now = max(now, ready[-1]) + seconds[k]
            ends.append(now)
        after = [max(sum(seconds[j] for j in ops if before[j] >> k & 1) for ops in graph.links.values()) for k in own]
        on_links = [k for k, op in enumerate(graph.ops) if op.link]
        made_here = [any(not graph.ops[i].link for i in deps) for deps in graph.deps]  # some of what each op reads
        reading = [seconds[j] for j in on_links if made_here[j]]
        reading += [0.0 for k in range(own[-1] + 1, len(made_here)) if made_here[k] and not graph.ops[k].link]
        bound = max(end + more for end, more in zip(ends, after, strict=True))
        return cls(bound, ready[0] + min([after[-1], *reading]))


def _bits(number: int) -> Iterator[int]:
    """The places of a number's bits."""
    while number:
        yield (number & -number).bit_length() - 1
        number &= number - 1


def _shares(problem: Problem, busiest: str, share: float) -> dict[str, float]:
    """By link, "" for the processor, its share; they add up to one."""
    links = problem.graph.links
    of_link = {name: share if name == busiest else LEAST / len(links) for name in links}
    of_link[""] = 1.0 - sum(of_link.values())
    return of_link


def _without_links(problem: Problem) -> Problem:
    """The same, the processor waits for each op, and no second memory."""
    return replace(problem.with_host(None), graph=problem.graph.without_links())
