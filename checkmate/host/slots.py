"""Which bytes of a second memory are free.

A value may lie there in several pieces. So what is free can always be used, and a capacity that holds the values of a
plan in bytes holds them in any order: no address has to be planned.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

BLOCK = 4096  # bytes: what a file is read and written by without the page cache


class Run(NamedTuple):
    """Bytes side by side."""

    begin: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.begin + self.nbytes


def rounded(nbytes: int) -> int:
    """Bytes that a value of so many takes in a second memory.

    >>> rounded(0), rounded(1), rounded(4096), rounded(4097)
    (0, 4096, 4096, 8192)
    """
    return -(-nbytes // BLOCK) * BLOCK


class Slots:
    """Free and taken bytes, in blocks.

    >>> slots = Slots(4 * BLOCK)
    >>> first, second = slots.take(5000), slots.take(1)
    >>> slots.give(first)
    >>> [(run.begin // BLOCK, run.nbytes // BLOCK) for run in slots.take(3 * BLOCK)]
    [(0, 2), (3, 1)]
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = rounded(capacity)
        self._free = [Run(0, self.capacity)] if self.capacity else []  # sorted, none touches another

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return sum(run.nbytes for run in self._free)

    def take(self, nbytes: int) -> tuple[Run, ...] | None:
        """Bytes for a value: the first gap that holds it, or else the lowest gaps together; None where that is all."""
        need = rounded(nbytes)
        if need > self.free:
            return None
        whole = [gap for gap in self._free if gap.nbytes >= need][:1]
        taken = []
        for gap in whole or [*self._free]:
            if not need:
                break
            run = Run(gap.begin, min(need, gap.nbytes))
            self._free.remove(gap)
            if run.end < gap.end:
                insort(self._free, Run(run.end, gap.end - run.end))
            taken.append(run)
            need -= run.nbytes
        return tuple(taken)

    def give(self, runs: tuple[Run, ...]) -> None:
        """Have bytes back that were taken."""
        for run in runs:
            insort(self._free, run)
        merged: list[Run] = []
        for run in self._free:
            touches = bool(merged) and merged[-1].end == run.begin
            begin = merged.pop().begin if touches else run.begin
            merged.append(Run(begin, run.end - begin))
        self._free = merged
