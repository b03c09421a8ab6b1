"""Search from the last op to the first for reruns in any order, as often as needed: plans, and proofs.

A schedule runs an op again once a stage at most, in PyTorch's order (`checkmate.core.schedule`), and then a value that
is made early waits while a long branch is made. A plan may make it late, or twice. As in
`checkmate.solvers.search.backward_search` a state is a stage and the set of values that what runs later needs, and a
set that is part of another one is the better of the two. Here any op that made one of them may have run just before,
whatever ran after it; or nothing more ran again in the stage. So where all states were pursued and none reached the
first op, no plan at all fits the budget.

Two rules keep the states few. What can be made from nothing, in PyTorch's order, beside all the rest, is made so: then
only the rest is needed, a part of what was. And of the states it is the one closest to the first op that is pursued,
the one with the fewest bytes first: where a budget is met there mostly is a plan straight ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from checkmate.solvers.common.incumbent import Clock
from checkmate.solvers.search.backward_search import ANY, SCRATCH, Trail, stages_of
from checkmate.solvers.search.value_sets import ValueSets


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

    def runs(self) -> list[list[int]] | None:
        """The ops that run in each stage, in order, of a plan within the budget; None if none was found.

        >>> from checkmate.core.problem import Problem
        >>> five = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])
        >>> AnyOrder(ValueSets(five), 9, Clock()).runs()
        [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 0, 4]]
        """
        found, trail = self._search(self.sets.T - 1)
        return stages_of(self.sets, trail) if found else None

    def refutes(self, t: int) -> bool:
        """Tell whether it is proven that no plan within the budget runs op t."""
        return not self._search(t)[0] and self.complete

    def _search(self, last: int) -> tuple[bool, Trail | None]:
        """Search backwards for a state that needs nothing before op ``last``; give the runs that led to it."""
        sets, left, self.reached = self.sets, self.most, last + 1
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
            left -= 1
            # Its predecessors.
            for stage, before, what in self._before(t, needed, begun=t <= last):
                if (stage, before) not in seen:
                    seen.add((stage, before))
                    then = trail if what is None else (trail, stage, what)
                    heapq.heappush(heap, (stage, sets.bytes_of(before), len(seen), before, then))
            if left <= 0 or self.clock.is_over:
                self.complete = False
                return False, None
        return False, None

    def _before(self, t: int, needed: int, *, begun: bool) -> Iterator[tuple[int, int, int | None]]:
        """Yield the runs that may precede op t, which needs ``needed`` in memory: (stage, its needs, op)."""
        sets = self.sets
        others: list[tuple[int, int, int]] = []
        for one in self._again(t, needed) if begun else ():
            if one[1] & needed == one[1]:  # it needs no more than before
                yield one
                return
            others.append(one)
        yield from others
        if not (t == sets.forward_length and needed & sets.gone) and self._fits(t - 1, t - 1, needed):
            yield t - 1, sets.before(t - 1, needed), None

    def _again(self, t: int, needed: int) -> Iterator[tuple[int, int, int]]:
        """Yield the reruns in stage t that change the needs."""
        sets, values = self.sets, needed & self.sets.free[t] & self.sets.below[t]
        missing = values & sets.below[sets.forward_length]
        while missing:  # as much of it as can be made from nothing
            scratch, rest = sets.from_scratch(t, missing), needed & ~missing
            held = rest | scratch.pinned
            if sets.base[t] + sets.bytes_of(held) + scratch.peak + sets.mandatory_bytes(t, held) <= self.budget:
                yield t, rest if self.loose else held, SCRATCH - missing
                break
            missing &= sets.below[sets.producer[missing.bit_length() - 1]]
        while values:
            k = sets.producer[values.bit_length() - 1]
            values &= ~sets.outputs[k]
            if k >= sets.forward_length and t - k > self.far:
                if self.loose:
                    yield t, needed & ~sets.outputs[k], k
                self.complete &= self.loose
            elif self._fits(t, k, needed):
                yield t, sets.before(k, needed), k

    def _fits(self, t: int, k: int, needed: int) -> bool:
        least = self.sets.at(t, k, needed)
        if least > self.budget:
            self.least = min(self.least, least)
        return least <= self.budget
