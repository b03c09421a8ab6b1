"""Search from the last op to the first over sets of values to have at hand: plans of a small peak, and lower bounds.

What a schedule has at hand is fixed by what runs later: going backwards, a run of op k takes what k makes out of the
set of values needed and puts in what k reads (`checkmate.core.schedule.Schedule.from_runs`). So a state is a set of
values, a step is the choice whether op k runs again in stage t or its value was kept from before, and a set that is
part of another one is the better of the two. The states of one place in the order of runs are pursued together, from
the last stage to the first. That no state is left is a proof; where too many are left, the most promising go on, and no
proof comes of it. (Decision diagrams in which states are dropped: Bergman, Cire, van Hoeve and Hooker, "Decision
Diagrams for Optimization", 2016.)

Cost does not count here. Where everything that is missing can be made again from nothing, that is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from checkmate.solvers.common.task import Clock, OutOfTime
from checkmate.solvers.search.value_sets import ValueSets

Trail = tuple["Trail | None", int, int]  # the trail before, a stage, and the runs in it: of op k, or -1 - a set
States = dict[int, Trail | None]  # what must be at hand -> what runs afterwards
SCRATCH = -1
FAR = 60  # stages: a gradient that has been let go for so long would take the whole backward to make again
ANY = 2**31  # stages


class TooWide(Exception):
    """More states than a proof may have."""


@dataclass
class BackwardSearch:
    """One search under a budget.

    Attributes:
        width: states that go on at most.
        complete: no state was dropped so far: without a state left, no schedule fits the budget.
        least: the smallest number of bytes by which a state was refused; a budget below it changes nothing.
        reached: the last stage that was looked at.
    """

    sets: ValueSets
    budget: int
    width: int
    clock: Clock
    exact: bool = False  # pursue also what seems worse
    far: int = ANY  # ops of the backward run again no more than so many stages later
    homes: Mapping[int, int] | None = None  # where given, of these those do, in these stages and nowhere else
    loose: bool = False  # ask only for what a proof needs: pinned values that come in on the way are left to `owed`
    complete: bool = True
    least: int = 2**62
    reached: int = -1

    def stage(self, t: int, states: States) -> States:
        """What must be at hand when stage t begins, for each state at its end; empty if nothing fits."""
        sets = self.sets
        begun: States = {}
        self.reached = t
        if self.clock.is_over:
            raise OutOfTime
        for needed, trail in states.items():
            if self._fits(t, t, needed):
                begun.setdefault(sets.before(t, needed), trail)
        return self._within(t, begun)

    def _within(self, t: int, begun: States) -> States:
        """Decide what runs again in stage t, from the last op before t to the first."""
        done: States = {}
        free = self.sets.free[t]
        waiting: dict[int, States] = {}  # by the op to decide on next
        queue: list[int] = []
        count = 0

        def wait(needed: int, trail: Trail | None, k: int) -> int:
            undecided = needed & free & self.sets.below[k]
            if not undecided:
                done.setdefault(needed, trail)
                return 0
            following = self.sets.producer[undecided.bit_length() - 1]
            if following not in waiting:
                waiting[following] = {}
                heapq.heappush(queue, -following)
            before = len(waiting[following])
            waiting[following].setdefault(needed, trail)
            return len(waiting[following]) - before

        for needed, trail in begun.items():
            count += wait(needed, trail, t)
        while queue:
            k = -heapq.heappop(queue)
            now = waiting.pop(k)
            count -= len(now)
            for needed, trail in now.items():
                for state, path in self._decide(t, k, needed, trail, done):
                    count += wait(state, path, k)
            if count > 2 * self.width:
                waiting, count = self._thin_waiting(waiting)
            if self.clock.is_over:
                raise OutOfTime
        return self._thin(done)

    def _decide(self, t: int, k: int, needed: int, trail: Trail | None, done: States) -> list[tuple[int, Trail | None]]:
        """Op k runs in stage t, or what it makes is kept from before; or all that is missing is made from nothing."""
        sets, free = self.sets, self.sets.free[t]
        found: list[tuple[int, Trail | None]] = []
        if k < sets.forward_length:
            missing = needed & free & sets.below[k + 1]
            scratch = sets.from_scratch(t, missing)
            others = needed ^ missing
            with_pinned = others | scratch.pinned
            peak = sets.base[t] + sets.bytes_of(with_pinned) + scratch.peak + sets.owed(t, with_pinned)
            if peak <= self.budget:
                done.setdefault(others if self.loose else with_pinned, (trail, t, SCRATCH - missing))
                if with_pinned == others or self.loose or not self.exact:
                    self.complete &= with_pinned == others or self.loose
                    return []
        if k >= sets.forward_length and t - k > self.far:
            if self.loose:  # as if all that is missing were to be had for nothing
                done.setdefault(needed & ~(free & sets.below[k + 1]), trail)
                return []
            self.complete = False
        elif self._may_run(t, k) and self._fits(t, k, needed):
            found.append((sets.before(k, needed), (trail, t, k)))
        if self.homes is not None and self.homes.get(k) == t:
            return found
        kept = needed & ~(sets.below[k] & free)  # for sure, in the last moment of the stage before
        if t == sets.forward_length and needed & sets.outputs[k] & sets.gone:
            return found
        if self._fits(t - 1, t - 1, kept):
            found.append((needed, trail))
        return found

    def _may_run(self, t: int, k: int) -> bool:
        return self.homes is None or k < self.sets.forward_length or self.homes.get(k) == t

    def _fits(self, t: int, k: int, needed: int) -> bool:
        least = self.sets.at(t, k, needed)
        if least > self.budget:
            self.least = min(self.least, least)
        return least <= self.budget

    def _thin_waiting(self, waiting: dict[int, States]) -> tuple[dict[int, States], int]:
        where = {needed: k for k, states in waiting.items() for needed in states}
        kept = self._thin({needed: waiting[k][needed] for needed, k in where.items()})
        thinned: dict[int, States] = {k: {} for k in waiting}
        for needed, trail in kept.items():
            thinned[where[needed]][needed] = trail
        return thinned, len(kept)

    def _thin(self, states: States) -> States:
        """Without those that contain another one; and no more than the width."""
        if len(states) <= 1:
            return states
        best: list[int] = []
        for needed in sorted(states, key=self.sets.bytes_of):
            if not any(other & needed == other for other in best):
                best.append(needed)
        if len(best) > self.width:
            if self.loose:
                raise TooWide
            self.complete = False
            best = self._promising(best)
        return {needed: states[needed] for needed in best}

    def _promising(self, states: list[int]) -> list[int]:
        """By three measures in turn: the bytes, the peak of making what is free from nothing, and between them."""
        ranked = [sorted(states, key=measure) for measure in self._measures()]
        chosen: dict[int, None] = {}
        for row in zip(*ranked, strict=True):
            for needed in row:
                if len(chosen) < self.width:
                    chosen.setdefault(needed)
        return list(chosen)

    def _measures(self) -> tuple[Callable[[int], float], ...]:
        sets, t = self.sets, self.reached
        forward = sets.below[sets.forward_length] & sets.free[t]

        def alone(needed: int) -> int:
            return sets.bytes_of((needed & ~forward) | sets.from_scratch(t, needed & forward).pinned)

        return (
            lambda needed: alone(needed) + sets.from_scratch(t, needed & forward).peak,
            lambda needed: alone(needed) + 0.5 * sets.bytes_of(needed & forward),
            sets.bytes_of,
        )


def find_plan(
    sets: ValueSets,
    budget: int,
    *,
    width: int,
    clock: Clock,
    exact: bool = False,
    homes: Mapping[int, int] | None = None,
) -> tuple[np.ndarray | None, BackwardSearch]:
    """The runs R (T, T) of a schedule within the budget, or None; the search says whether that is proven.

    Raises:
        OutOfTime: where the clock runs out first.
    """
    far = ANY if exact or homes is not None else _far(sets) if width > 1 else 0
    search = BackwardSearch(sets, budget, width, clock, exact, far=far, homes=homes, complete=homes is None)
    states: States = {0: None}
    for t in reversed(range(sets.T)):
        states = search.stage(t, states)
        if not states:
            return None, search
    return _runs(sets, next(iter(states.values()))), search


def refute(sets: ValueSets, budget: int, t: int, *, width: int, clock: Clock) -> int | None:
    """A proof that no schedule fits the budget, from what op t and the ops before it need; None where there is none.

    Nothing is asked for at the end of stage t but what is owed in any case, so that what follows is needed in every
    schedule. It ends without a proof once nothing more is needed, or at too many states. A proof is the number of bytes
    below which the same search finds nothing: more than the budget.

    Raises:
        OutOfTime: where the clock runs out first.
    """
    search = BackwardSearch(sets, budget, width, clock, loose=True, far=_far(sets))
    states: States = {0: None}
    try:
        for stage in range(t, -1, -1):
            states = search.stage(stage, states)
            if not states:
                return search.least
            if 0 in states:
                break
    except TooWide:
        pass
    return None


def _far(sets: ValueSets) -> int:
    """How long gradients may have been let go; as long as can be where updates wait for all of them, to be clipped."""
    return ANY if sets.problem.limits.until else FAR


def _runs(sets: ValueSets, trail: Trail | None) -> np.ndarray:
    R = np.eye(sets.T, dtype=bool)
    while trail is not None:
        trail, t, what = trail
        if what >= 0:
            R[t, what] = True
            continue
        missing = SCRATCH - what
        while missing:
            k = sets.producer[missing.bit_length() - 1]
            R[t, k] = True
            missing = sets.before(k, missing) & sets.free[t]
    return R
