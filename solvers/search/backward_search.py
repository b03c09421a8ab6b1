"""Search from the last op to the first over sets of values in memory: plans of a small peak, and lower bounds.

What a schedule has at hand is fixed by what runs later: going backwards, a run of op k takes what k makes out of the
set of values needed and puts in what k reads (`checkmate.core.schedule.Schedule.from_runs`). So a state is a set of
values, a step is the choice whether op k runs again in stage t or its value was kept from before, and a set that is
part of another one is the better of the two. The states of one place in the order of runs are pursued together, from
the last stage to the first. That no state is left is a proof; where too many are left, the most promising go on, and no
proof comes of it. (Decision diagrams in which states are dropped: Bergman, Cire, van Hoeve and Hooker, "Decision
Diagrams for Optimization", 2016.)

`Backward` is the engine; the classes that derive from it say what is decided, and which states go on. In
`BackwardSearch` cost does not count: where everything that is missing can be made again from nothing, that is done. In
`checkmate.solvers.search.backward_beam` it does.

A schedule runs an op again once a stage at most, in PyTorch's order (`checkmate.core.schedule`), and then a value that
is made early waits while a long branch is made. A plan may make it late, or twice: in `AnyOrder` any op that made a
needed value may have run just before, whatever ran after it; or nothing more ran again in the stage. So where all
states were pursued and none reached the first op, no plan at all fits the budget. Two rules keep the states few. What
can be made from nothing, in PyTorch's order, beside all other values is made so: then only these are needed, a part of
what was. And the state closest to the first op is pursued first, of several the one with the fewest bytes: where the
budget can be met, a plan mostly lies straight ahead.
"""

from __future__ import annotations

import contextlib
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from checkmate.solvers.common.incumbent import Clock, OutOfTime
from checkmate.solvers.common.schedules import Stages, as_matrix
from checkmate.solvers.search.value_sets import ValueSets

Trail = tuple["Trail | None", int, int]  # the trail before, a stage, and its runs: of op k, `KNOWN`, or `SCRATCH` - set
State = tuple[float, int, "Trail | None"]  # seconds of what runs again later, bytes that must be at hand, what runs
States = dict[int, State]  # by what must be at hand
Pending = dict[tuple[int, int, int], State]  # and by what may still be made again in the stage, and what must be
Homes = Mapping[int, range]  # of ops that run again, the stages in one of which they do, the last that can be
KNOWN = -1  # later stages run as in the known plan
SCRATCH = -1
NOWHERE = range(0)
FAR = 60  # stages: a gradient that has been let go for so long would take the whole backward to make again
MOST_OPS_ANY = 1000  # up to here it may all the same: in larger graphs such states leave no time for others
ANY = 2**31  # stages
CHUNK = 256  # states that are compared at a time


class TooWide(Exception):
    """Raised when a proof needs more states than it may have."""


class Waiting:
    """The states of a stage by the op to decide next, the last op first, and the finished states."""

    def __init__(self, sets: ValueSets) -> None:
        self.producer = sets.producer
        self.groups: dict[int, Pending] = {}
        self.queue: list[int] = []
        self.count = 0
        self.done: States = {}

    def add(self, needed: int, candidates: int, state: State, must: int = 0) -> None:
        """Add a state whose ``candidates`` may still be made again in this stage; of two equal ones keep the cheaper.

        Values of ``must`` have to be made again before the state is done; a state done without them is dropped.
        """
        if not candidates:
            rival = self.done.get(needed)
            if not must and (rival is None or state[0] < rival[0]):
                self.done[needed] = state
            return
        k = self.producer[candidates.bit_length() - 1]
        if k not in self.groups:
            self.groups[k] = {}
            heapq.heappush(self.queue, -k)
        group = self.groups[k]
        rival = group.get((needed, candidates, must))
        self.count += rival is None
        if rival is None or state[0] < rival[0]:
            group[needed, candidates, must] = state


class Backward(ABC):
    """A search under a budget, from the last stage to the first."""

    sets: ValueSets
    budget: int
    width: int  # states that go on at most
    clock: Clock
    complete: bool  # no state was dropped so far

    def back_from(self, last: int) -> Iterator[States]:
        """The stages from the last to the first with the values needed at their begin; none if nothing fits.

        Raises:
            OutOfTime: where the clock runs out first.
        """
        states: States = {0: (0.0, 0, None)}
        for t in range(last, -1, -1):
            if self.clock.is_over:
                raise OutOfTime
            waiting = Waiting(self.sets)
            self._begin(t, states, waiting)
            while waiting.queue:
                # Decide on the last op of those that may run again.
                k = -heapq.heappop(waiting.queue)
                pending = waiting.groups.pop(k)
                waiting.count -= len(pending)
                self._decide(t, k, pending, waiting)
                if waiting.count > 2 * self.width:
                    self._thin_waiting(t, waiting)
                if self.clock.is_over:
                    raise OutOfTime
            states = self._end(t, waiting.done)
            yield states

    def _undominated(self, states: States, order: Iterable[int]) -> Iterator[int]:
        """Yield the sets in this order, except where an earlier one needs less and costs less."""
        best: list[tuple[int, float]] = []
        for needed in order:
            seconds = states[needed][0]
            if not any(other & needed == other and cost <= seconds for other, cost in best):
                best.append((needed, seconds))
                if not len(best) % CHUNK and self.clock.is_over:
                    raise OutOfTime
                yield needed

    @abstractmethod
    def _begin(self, t: int, states: States, waiting: Waiting) -> None:
        """Run op t for the first time; the other runs of stage t are decided next."""

    @abstractmethod
    def _decide(self, t: int, k: int, pending: Pending, waiting: Waiting) -> None:
        """Run op k again in stage t, or keep its results from before."""

    @abstractmethod
    def _thin_waiting(self, t: int, waiting: Waiting) -> None:
        """Drop or merge states within stage t."""

    @abstractmethod
    def _end(self, t: int, states: States) -> States:
        """Select the states at the begin of stage t to continue from."""


def _fits(search: BackwardSearch | AnyOrder, t: int, k: int, needed: int) -> bool:
    """Tell whether op k fits in stage t if ``needed`` is in memory after it; the fewest bytes refused are noted."""
    least = search.sets.at(t, k, needed)
    if least > search.budget:
        search.least = min(search.least, least)
    return least <= search.budget


def stages_of(sets: ValueSets, trail: Trail | None, R: np.ndarray | None = None) -> Stages:
    """The ops that run in each stage of a trail, in order."""
    stages: Stages = [[] for _ in range(sets.T)]
    while trail is not None:
        trail, t, code = trail
        if code >= 0:
            stages[t].append(code)
            continue
        if code == KNOWN:
            assert R is not None
            stages[t:] = [np.flatnonzero(row[:i]).tolist() for i, row in enumerate(R[t:], t)]
            continue
        missing, reruns = SCRATCH - code, []
        while missing:
            k = sets.producer[missing.bit_length() - 1]
            reruns.append(k)
            missing = sets.before(k, missing) & sets.free[t]
        stages[t] += reversed(reruns)
    return [[*again, t] for t, again in enumerate(stages)]


@dataclass
class BackwardSearch(Backward):
    """A search for any plan, or for a proof that no plan exists."""

    sets: ValueSets
    budget: int
    width: int
    clock: Clock
    exact: bool = False  # pursue also what seems worse
    far: int = ANY  # ops of the backward run again no more than so many stages later
    homes: Homes | None = None  # where given, of these those do, in one of these stages and nowhere else
    loose: bool = False  # ask only for what a proof needs: pinned values on the way are left to the mandatory bytes
    complete: bool = True  # no state was dropped so far: without a state left, no schedule fits the budget
    least: int = 2**62  # bytes: the fewest for which a state was refused; a budget below that changes nothing
    reached: int = -1  # the last stage that was looked at

    def _begin(self, t: int, states: States, waiting: Waiting) -> None:
        self.reached = t
        for needed, (_, _, trail) in states.items():
            if _fits(self, t, t, needed):
                self._wait(t, t, self.sets.before(t, needed), trail, waiting)

    def _wait(self, t: int, k: int, needed: int, trail: Trail | None, waiting: Waiting) -> None:
        """Add a state in which ops before op k may still run again in stage t."""
        waiting.add(needed, needed & self.sets.free[t] & self.sets.below[k], (0.0, 0, trail))

    def _decide(self, t: int, k: int, pending: Pending, waiting: Waiting) -> None:
        """Decide as `Backward` does, or remake everything missing from nothing."""
        sets, free, done = self.sets, self.sets.free[t], waiting.done
        home = range(self.sets.T) if self.homes is None else self.homes.get(k, NOWHERE)
        must = self.homes is not None and t == home.start and bool(home)
        for (needed, _, _), (_, _, trail) in pending.items():
            # Remake everything missing at once, if that fits: no state of this stage needs less.
            if k < sets.forward_length:
                missing = needed & free & sets.below[k + 1]
                scratch = sets.from_scratch(t, missing)
                remaining = needed ^ missing
                with_pinned = remaining | scratch.pinned
                peak = sets.base[t] + sets.bytes_of(with_pinned) + scratch.peak + sets.mandatory_bytes(t, with_pinned)
                if peak <= self.budget:
                    done.setdefault(remaining if self.loose else with_pinned, (0.0, 0, (trail, t, SCRATCH - missing)))
                    if with_pinned == remaining or self.loose or not self.exact:
                        self.complete &= with_pinned == remaining or self.loose
                        continue
            # Run op k again, unless that is too far back or not its place.
            if k >= sets.forward_length and t - k > self.far:
                if self.loose:  # as if all that is missing were to be had for nothing
                    done.setdefault(needed & ~(free & sets.below[k + 1]), (0.0, 0, trail))
                    continue
                self.complete = False
            elif (k < sets.forward_length or t in home) and _fits(self, t, k, needed):
                self._wait(t, k, sets.before(k, needed), (trail, t, k), waiting)
            if must:
                continue
            # Or its results were kept from the stage before.
            kept = needed & ~(sets.below[k] & free)  # for sure, in the last moment of the stage before
            if t == sets.forward_length and needed & sets.outputs[k] & sets.gone:
                continue
            if _fits(self, t - 1, t - 1, kept):
                self._wait(t, k, needed, trail, waiting)

    def _thin_waiting(self, t: int, waiting: Waiting) -> None:
        where = {key[0]: (k, key) for k, group in waiting.groups.items() for key in group}
        survivors = self._end(t, {needed: waiting.groups[k][key] for needed, (k, key) in where.items()})
        waiting.groups, waiting.count = {k: {} for k in waiting.groups}, len(survivors)
        for needed, state in survivors.items():
            k, key = where[needed]
            waiting.groups[k][key] = state

    def _end(self, t: int, states: States) -> States:
        """Drop states that contain another one, and those beyond the width."""
        if len(states) <= 1:
            return states
        best = list(self._undominated(states, sorted(states, key=self.sets.bytes_of)))
        if len(best) <= self.width:
            return {needed: states[needed] for needed in best}
        if self.loose:
            raise TooWide
        self.complete = False
        # Order them by three measures in turn: the peak of making free values anew, bytes, and between them.
        sets = self.sets
        forward = sets.below[sets.forward_length] & sets.free[t]

        def alone(needed: int) -> int:
            return sets.bytes_of((needed & ~forward) | sets.from_scratch(t, needed & forward).pinned)

        measures = (
            lambda needed: alone(needed) + sets.from_scratch(t, needed & forward).peak,
            lambda needed: alone(needed) + 0.5 * sets.bytes_of(needed & forward),
            sets.bytes_of,
        )
        ranked = [sorted(best, key=measure) for measure in measures]
        promising = dict.fromkeys(chain(*zip(*ranked, strict=True)))
        return {needed: states[needed] for needed in islice(promising, self.width)}


def find_plan(
    sets: ValueSets,
    budget: int,
    *,
    width: int,
    clock: Clock,
    exact: bool = False,
    homes: Homes | None = None,
    far: int | None = None,
) -> tuple[np.ndarray | None, BackwardSearch]:
    """R (T, T) of a schedule within the budget, or None; the search tells whether that is a proof.

    Args:
        far: stages after which an op of the backward may run again: by default none in the narrowest search.

    Raises:
        OutOfTime: where the clock runs out first.
    """
    if far is None:
        far = ANY if exact or homes is not None else far_enough(sets) if width > 1 else 0
    search = BackwardSearch(sets, budget, width, clock, exact, far=far, homes=homes, complete=homes is None)
    for states in search.back_from(sets.T - 1):
        if not states:
            return None, search
    return as_matrix(stages_of(sets, next(iter(states.values()))[2])), search


def refute(sets: ValueSets, budget: int, t: int, *, width: int, clock: Clock) -> int | None:
    """A proof that no schedule fits the budget, from the needs of op t and earlier ops; None if it fails.

    The search begins at the end of stage t, where it asks for the mandatory bytes only: so all that it finds to be
    needed is needed in every schedule. It fails once nothing more is needed, or at too many states. The proof is a
    number of bytes, more than the budget, below which the same search finds nothing.

    Raises:
        OutOfTime: where the clock runs out first.
    """
    search = BackwardSearch(sets, budget, width, clock, loose=True, far=far_enough(sets))
    with contextlib.suppress(TooWide):
        for states in search.back_from(t):
            if not states:
                return search.least
            if 0 in states:
                break
    return None


def far_enough(sets: ValueSets) -> int:
    """The number of stages after which gradients may be gone; all in small graphs, or if updates wait for clipping."""
    return ANY if sets.T <= MOST_OPS_ANY or sets.problem.limits.last_stage else FAR


@dataclass
class AnyOrder:
    """A search within a budget, for a plan or for a proof that no plan exists."""

    sets: ValueSets
    budget: int
    clock: Clock
    far: int = ANY  # stages after which no op of the backward runs again; a proof has their values for nothing
    most: int = 10_000  # states that are pursued
    loose: bool = False  # ask only for what a proof needs: pinned values on the way are left to the mandatory bytes
    complete: bool = True  # all states that there are were pursued so far
    least: int = 2**62  # bytes: the fewest for which a state was refused; a budget below that changes nothing
    reached: int = -1  # the stage closest to the first op that was looked at

    def runs(self) -> Stages | None:
        """The ops that run in each stage, in order, of a plan within the budget; None if none was found.

        >>> from checkmate.core.problem import Problem
        >>> five = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])
        >>> AnyOrder(ValueSets(five), 9, Clock()).runs()
        [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 0, 4]]
        """
        success, trail = self._search(self.sets.T - 1)
        return stages_of(self.sets, trail) if success else None

    def refutes(self, t: int) -> bool:
        """Tell whether it is proven that no plan within the budget runs op t."""
        return not self._search(t)[0] and self.complete

    def _search(self, last: int) -> tuple[bool, Trail | None]:
        """Search backwards for a state that needs nothing before op ``last``; give the runs that led to it."""
        sets, states_left, self.reached = self.sets, self.most, last + 1
        heap: list[tuple[int, int, int, int, Trail | None]] = [(last + 1, 0, 0, 0, None)]
        seen = {(last + 1, 0)}
        pursued: dict[int, list[int]] = {}
        while heap:
            # Take the state nearest the first op, of those the one with the fewest bytes.
            t, _, _, needed, trail = heapq.heappop(heap)
            self.reached = min(self.reached, t)
            if t == 0 or (self.loose and t <= last and not needed & sets.free[t]):
                return True, trail
            # A state that needs a superset of a pursued one's values cannot do better.
            better = pursued.setdefault(t, [])
            if any(other & needed == other for other in better):
                continue
            better.append(needed)
            states_left -= 1
            for stage, before, code in self._before(t, needed, begun=t <= last):
                if (stage, before) not in seen:
                    seen.add((stage, before))
                    then = trail if code is None else (trail, stage, code)
                    heapq.heappush(heap, (stage, sets.bytes_of(before), len(seen), before, then))
            if states_left <= 0 or self.clock.is_over:
                self.complete = False
                return False, None
        return False, None

    def _before(self, t: int, needed: int, *, begun: bool) -> Iterator[tuple[int, int, int | None]]:
        """Yield the runs that may precede op t, which needs ``needed`` in memory: (stage, its needs, op)."""
        sets = self.sets
        reruns: list[tuple[int, int, int]] = []
        for run in self._again(t, needed) if begun else ():
            if run[1] & needed == run[1]:  # it needs no more than before
                yield run
                return
            reruns.append(run)
        yield from reruns
        if not (t == sets.forward_length and needed & sets.gone) and _fits(self, t - 1, t - 1, needed):
            yield t - 1, sets.before(t - 1, needed), None

    def _again(self, t: int, needed: int) -> Iterator[tuple[int, int, int]]:
        """Yield the reruns in stage t that change the needs."""
        sets, values = self.sets, needed & self.sets.free[t] & self.sets.below[t]
        missing = values & sets.below[sets.forward_length]
        while missing:  # as much of it as can be made from nothing
            scratch, remaining = sets.from_scratch(t, missing), needed & ~missing
            held = remaining | scratch.pinned
            if sets.base[t] + sets.bytes_of(held) + scratch.peak + sets.mandatory_bytes(t, held) <= self.budget:
                yield t, remaining if self.loose else held, SCRATCH - missing
                break
            missing &= sets.below[sets.producer[missing.bit_length() - 1]]
        while values:
            k = sets.producer[values.bit_length() - 1]
            values &= ~sets.outputs[k]
            if k >= sets.forward_length and t - k > self.far:
                if self.loose:
                    yield t, needed & ~sets.outputs[k], k
                self.complete &= self.loose
            elif _fits(self, t, k, needed):
                yield t, sets.before(k, needed), k
