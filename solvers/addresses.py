"""Place blocks of memory with known lifetimes in one arena.

This is dynamic storage allocation: blocks that are alive at the same moment must not overlap, and the arena is to be no
higher than it must. The most bytes alive at any moment, the live peak, is a bound; a placement as high is optimal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.errors import SolverError
from checkmate.solvers.search.packing import pack

IntArray = npt.NDArray[np.int64]
TIME_LIMIT = 5.0  # seconds, for what first fit leaves open
AT_THE_BOUND = 0.15  # of the time, to pack blocks as low as nothing can be lower


class Block(NamedTuple):
    """A block of bytes, alive from moment ``born`` up to, not including, moment ``died``; moments count from 0."""

    born: int
    died: int
    size: int  # bytes


@dataclass(frozen=True)
class Placement:
    """An address for each block."""

    offsets: tuple[int, ...]  # bytes from the begin of the arena
    height: int  # bytes of the arena
    bound: int  # bytes below which no placement of these blocks is

    @property
    def gap(self) -> float:
        """(height - bound) / height: the largest share of the arena that a better placement could save."""
        return (self.height - self.bound) / self.height if self.height else 0.0


def place_blocks(blocks: Sequence[Block], *, time_limit: float = TIME_LIMIT, gap: float = 0.0) -> Placement:
    """Find an address for each block, in an arena as low as can be found.

    Args:
        blocks: in any order; those without bytes or without a moment lie anywhere.
        time_limit: seconds to search for a lower arena than first fit finds.
        gap: an arena whose gap is not above this is low enough.

    Raises:
        ValueError: for a block that dies before it is born, or has fewer bytes than none.
        SolverError: if a search has placed blocks upon each other; it is wrong then, not the blocks.

    >>> place_blocks([Block(0, 2, 64), Block(1, 3, 64), Block(2, 4, 64)])
    Placement(offsets=(0, 64, 0), height=128, bound=128)
    """
    until = time.perf_counter() + time_limit
    data = np.array(blocks, dtype=np.int64).reshape(-1, 3)
    if len(data) and (data[:, 2].min() < 0 or (data[:, 1] < data[:, 0]).any()):
        wrong = next(block for block in blocks if block.size < 0 or block.died < block.born)
        raise ValueError(f"{wrong} dies before it is born, or has fewer bytes than none.")
    data[data[:, 0] == data[:, 1], 2] = 0  # blocks that never live need no bytes
    bound = live_peak(blocks)
    born, died, size = data.T
    span = died - born
    # First fit, in several orders: earlier blocks have the choice.
    best: Placement | None = None
    for keys in ((born, -size), (born, -size * span), (-size, -span), (-size, born), (-size, -died)):
        offsets = _first_fit(data, np.lexsort(keys))
        height = int((offsets + data[:, 2]).max(initial=0))
        if best is None or height < best.height:
            best = Placement(tuple(offsets.tolist()), height, bound)
        if best.gap <= gap or time.perf_counter() > until:
            break
    assert best is not None
    # Search for a lower arena: as low as the bound, then half way up to the lowest, and so on.
    living = [Block(*map(int, row)) for row in data]
    unit = math.gcd(*(block.size for block in living))  # the least height is a sum of sizes
    below = bound - unit  # no arena of this height, or none that was found
    height, share = bound, AT_THE_BOUND
    while best.gap > gap and below + unit < best.height and (left := until - time.perf_counter()) > 0:
        packing = pack(living, height, time_limit=share * left)
        if packing.offsets is not None:
            if pair := next(overlaps(living, packing.offsets), None):
                raise SolverError(f"Two of {len(living)} blocks were placed upon each other: {pair}.")
            tops = [offset + block.size for offset, block in zip(packing.offsets, living, strict=True)]
            best = Placement(packing.offsets, max(tops), best.bound)
        else:
            below = height
            if packing.impossible:
                best = replace(best, bound=height + unit)
        share = 0.5
        height = below + unit * math.ceil((best.height - below) / (2 * unit))
    return best


def _first_fit(data: IntArray, order: IntArray) -> IntArray:
    """Offsets (N,) of blocks (N, 3): in this order, each at the lowest address that is free throughout its life."""
    born, died, size = data[order].T
    begins = np.zeros(len(data), dtype=np.int64)
    ends = np.zeros(len(data), dtype=np.int64)
    for k in range(len(order)):
        beside = np.flatnonzero((born[:k] < died[k]) & (died[:k] > born[k]))
        beside = beside[np.argsort(begins[beside])]
        floors = np.concatenate(([0], np.maximum.accumulate(ends[beside])))
        room = np.append(begins[beside], np.iinfo(np.int64).max) - floors
        begins[k] = floors[np.argmax(room >= size[k])]
        ends[k] = begins[k] + size[k]
    offsets = np.empty(len(data), dtype=np.int64)
    offsets[order] = begins
    return offsets


def live_peak(blocks: Iterable[Block]) -> int:
    """The most bytes of the blocks that are alive at one moment."""
    data = np.array(list(blocks), dtype=np.int64).reshape(-1, 3)
    born, died, size = data[data[:, 0] < data[:, 1]].T
    moments, at = np.unique(np.concatenate([born, died]), return_inverse=True)
    change = np.zeros(len(moments), dtype=np.int64)
    np.add.at(change, at, np.concatenate([size, -size]))
    return int(np.cumsum(change).max(initial=0))


def overlaps(blocks: Sequence[Block], offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of blocks, each with its address, that are alive at the same moment and share bytes."""
    events = [(b.died, 0, i) for i, b in enumerate(blocks) if b.died > b.born and b.size]
    events += [(b.born, 1, i) for i, b in enumerate(blocks) if b.died > b.born and b.size]
    alive: set[int] = set()
    for _, born, i in sorted(events):
        if not born:
            alive.remove(i)
            continue
        for j in alive:
            if offsets[i] < offsets[j] + blocks[j].size and offsets[j] < offsets[i] + blocks[i].size:
                yield j, i
        alive.add(i)
