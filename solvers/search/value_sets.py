"""Sets of values as bits of an integer, with their bytes: the tables of the backward searches.

A set of values is one Python int, a bit for each value, in the order of their producers: set operations on hundreds of
values take a fraction of a microsecond. Only values that may come and go have a bit: those that an op makes and an op
reads, that are no results of the step, and that are larger than a grain, or save more than that where they are written
over, or are gone before the backward by a rule. Results are at hand from their first run on; what nobody reads counts
as workspace.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import NamedTuple

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Tables

MOST_SUMS = 300_000  # sums of bytes that are remembered
MOST_PATHS = 100  # tried from each pinned value


class MandatoryBytes(NamedTuple):
    """Mandatory bytes: throughout a stage one of ``values`` is in memory, with ``least`` bytes or more."""

    values: int
    least: int


@dataclass(frozen=True)
class RebuildCost:
    """The cost of making a set of values from nothing: bytes at the peak, and the pinned values it reads."""

    peak: int
    pinned: int


class ValueSets:
    """Sets of values, their bytes, and the bytes that every schedule holds at a stage.

    >>> sets = ValueSets(Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1, 2, 4, 8]))
    >>> sets.bytes_of(sets.inputs[3]), sets.from_scratch(3, sets.inputs[3]).peak
    (5, 7)
    """

    def __init__(self, problem: Problem, *, grain: int = 0) -> None:
        tables = Tables.of(problem)
        self.problem, self.tables, self.T = problem, tables, len(tables.inputs)
        self.forward_length = problem.graph.forward_length
        # The values that sets are of: those above the grain that may go. A set is an int, a bit for each.
        large = {v for savings in tables.savings for v, saved in savings if saved > grain} | tables.recomputed
        moving = [
            v
            for v, k in enumerate(tables.producer)
            if k >= 0 and (tables.size[v] > grain or v in large) and tables.users[v] and not tables.result[v]
        ]
        self.values = sorted(moving, key=lambda v: tables.producer[v])
        self.bit = {v: 1 << i for i, v in enumerate(self.values)}
        self.size = [tables.size[v] for v in self.values]
        self.producer = [tables.producer[v] for v in self.values]
        # Per op, or per stage, its sets and bytes.
        self.inputs = [self._set(vs) for vs in tables.inputs]
        self.outputs = [self._set(vs) for vs in tables.outputs]
        self.working = [  # per op: workspace, and what it makes that is a result or that nobody reads
            sum(tables.size[v] for v in vs if tables.result[v] or not tables.users[v]) + workspace
            for vs, workspace in zip(tables.outputs, tables.workspace, strict=True)
        ]
        # Per op, the most first: the bit of what it may write over, bytes less, and up to which first run it stays.
        # Values without a bit count no bytes anyway: only what a way saves beside them is less. What a pinned op made
        # stays until its last use; what others made need not stay, -1.
        self.savings: list[list[tuple[int, int, int]]] = []
        for ways in tables.savings:
            entries = []
            for v, saved in ways:
                less = saved if v in self.bit else saved - tables.size[v]
                until = tables.users[v][-1] if tables.pinned[tables.producer[v]] else -1
                if less > 0:
                    entries.append((self.bit.get(v, 0), less, until))
            self.savings.append(sorted(entries, key=lambda saving: -saving[1]))
        self.has_savings = any(self.savings)
        self.below = [*accumulate(self.outputs, or_, initial=0)]  # per op, the values made before it
        self.gone = self._set(tables.recomputed)  # not at hand when the backward begins
        self.closing = [self._set(tables.closing.get(t, ())) for t in range(self.T)]  # not made again after it
        # Per stage, the values that may be made again in it, and the bytes that are resident or results made before it.
        free = self._set(v for v in self.values if not tables.pinned[tables.producer[v]])
        closed = [0] * self.T  # per stage, the values whose ops may run in no later one
        for v, k in zip(self.values, self.producer, strict=True):
            closed[tables.last_stage[k]] |= self.bit[v]
        self.free = [*accumulate(closed[:-1], lambda free, gone: free & ~gone if free & gone else free, initial=free)]
        results = [sum(tables.size[v] for v in vs if tables.result[v]) for vs in tables.outputs]
        self.base = [*accumulate(results[:-1], initial=tables.resident)]
        # Caches for many sets.
        sizes = np.array(self.size + [0] * (-len(self.size) % 8), dtype=np.int64).reshape(-1, 8)
        members = (np.arange(256)[:, None] >> np.arange(8)) & 1  # (256, 8)
        self._eights = sizes @ members.T  # (⌈V/8⌉, 256) int64: the bytes of each set of eight neighbours
        self._rows = np.arange(len(self._eights))
        self._sums: dict[int, int] = {0: 0}
        self._scratch: dict[int, dict[int, RebuildCost]] = {free: {0: RebuildCost(0, 0)} for free in self.free}
        self.debts = _debts(self)
        self._owing = [reduce(or_, (debt.values for debt in debts), 0) for debts in self.debts]
        self._least: list[dict[int, int]] = [{} for _ in range(self.T)]

    def _set(self, values: Iterable[int]) -> int:
        return sum(self.bit.get(v, 0) for v in values)

    def bytes_of(self, values: int) -> int:
        """Bytes of a set of values."""
        total = self._sums.get(values)
        if total is None:
            eights = np.frombuffer(values.to_bytes(len(self._eights), "little"), dtype=np.uint8)
            total = int(self._eights[self._rows, eights].sum())
            if len(self._sums) > MOST_SUMS:
                self._sums.clear()
            self._sums[values] = total
        return total

    def at(self, t: int, k: int, needed: int) -> int:
        """A lower bound of the bytes while op k runs in stage t, if ``needed`` is in memory after it."""
        held = needed | self.inputs[k] | self.outputs[k]
        saved = self.saved(t, k, needed) if self.savings[k] else 0
        return self.base[t] + self.bytes_of(held) + self.working[k] + self.mandatory_bytes(t, held) - saved

    def saved(self, t: int, k: int, needed: int) -> int:
        """An upper bound of the bytes that op k saves in stage t by in-place writes, if ``needed`` is there after it.

        What has no bit is taken to go in any case.
        """
        for bit, saved, until in self.savings[k]:
            if not bit & needed and until < t + (k == t):
                return saved
        return 0

    def mandatory_bytes(self, t: int, held: int) -> int:
        """Bytes that every schedule has in memory in stage t beside the set ``held``."""
        touched = held & self._owing[t]
        least = self._least[t].get(touched)
        if least is None:
            least = sum(debt.least for debt in self.debts[t] if not debt.values & touched)
            self._least[t][touched] = least
        return least

    def from_scratch(self, t: int, values: int) -> RebuildCost:
        """The cost of making these free values in stage t from values that are not free, all their ops anew."""
        free = self.free[t]
        cache = self._scratch[free]
        chain: list[tuple[int, int, int]] = []
        while values not in cache:
            k = self.producer[values.bit_length() - 1]
            peak = self.bytes_of(values | (self.inputs[k] & free) | self.outputs[k]) + self.working[k]
            peak -= next((saved for bit, saved, _ in self.savings[k] if bit & free & ~values), 0)
            chain.append((values, peak, self.inputs[k] & ~free))
            values = self.before(k, values) & free
        scratch = cache[values]
        for values, peak, pinned in reversed(chain):
            scratch = RebuildCost(max(scratch.peak, peak), scratch.pinned | pinned)
            cache[values] = scratch
        return scratch

    def before(self, k: int, needed: int) -> int:
        """The values that must be in memory before op k runs, if ``needed`` must be after it."""
        return (needed & ~self.outputs[k]) | self.inputs[k]


def grain_of(problem: Problem, most: int) -> int:
    """The largest size such that all values of up to that size together have at most ``most`` bytes."""
    sizes = np.sort(problem.sizes)
    fits = np.flatnonzero(sizes.cumsum() <= most)
    grain = int(sizes[fits[-1]]) if len(fits) else 0
    return grain if sizes[sizes <= grain].sum() <= most else max(0, grain - 1)


def _debts(sets: ValueSets) -> list[list[MandatoryBytes]]:
    """Mandatory bytes per stage: values that nothing can remake, or values made from them, until their last reader.

    Let an op make v_1 that is pinned, or that may not run again from some stage on. Let free ops make v_2 from v_1, v_3
    from v_2 and so on, and let op j read the last of these. At any moment from then on and before j first runs, one of
    v_1, v_2, ... is at hand: if none were, then the last one would have to be made again from the one before it, and
    that one too, back to v_1, which nothing makes again. So what is at hand cuts all such paths, and is at least as
    large as a flow along them: each path owes some bytes, and no value lies on paths that owe more than its size
    together. The flow is built up greedily, stage by stage: a path ends with the last op that reads its last value, and
    the widest one takes its place.
    """
    tables = sets.tables
    spare = list(tables.size)  # per value: bytes that no path owes
    debts: list[list[MandatoryBytes]] = [[] for _ in range(sets.T)]
    ending: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(sets.T)]  # paths from a source, and bytes
    closed: dict[int, list[int]] = {}  # per stage, the values that are not made again after it
    for k, until in enumerate(tables.last_stage):
        closed.setdefault(until, []).extend(tables.outputs[k])
    for t in range(1, sets.T):
        # Paths that ended free their bytes.
        for path, least in ending[t - 1]:
            for v in path:
                spare[v] += least
        begun = (path[0] for path, _ in ending[t - 1])
        for source in dict.fromkeys([*begun, *(v for v in closed.get(t - 1, ()) if v in sets.bit)]):
            # New ones begin where they ended, and at values that close here.
            while path := _widest(sets, source, t, spare):
                least, end = min(spare[v] for v in path), tables.users[path[-1]][-1]
                for v in path:
                    spare[v] -= least
                ending[end].append((path, least))
                debt = MandatoryBytes(sum(sets.bit[v] for v in path), least)
                for stage in range(t, end + 1):
                    debts[stage].append(debt)
    return debts


def _widest(sets: ValueSets, source: int, t: int, spare: list[int]) -> tuple[int, ...]:
    """The path from a value to a reader in stage t or later on which most bytes are left; () if there is none."""
    tables = sets.tables
    seen = {source}
    border: list[tuple[int, int, tuple[int, ...]]] = []  # bytes and last use, negated, of a path
    if spare[source] > 0:
        border.append((-spare[source], -tables.users[source][-1], (source,)))
    for _ in range(MOST_PATHS):
        if not border:
            break
        wide, end, path = heapq.heappop(border)
        if -end >= t:
            return path
        for k in tables.users[path[-1]]:
            for w in tables.outputs[k]:
                if w not in seen and spare[w] > 0 and sets.bit.get(w, 0) & sets.free[0]:
                    seen.add(w)
                    heapq.heappush(border, (max(wide, -spare[w]), -tables.users[w][-1], (*path, w)))
    return ()
