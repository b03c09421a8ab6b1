"""Lower an arena by placing blocks in another order: those that stick out go before others, again and again.

First fit places blocks one by one, and the order decides how high it gets. What ends above the live peak was placed too
late: so some of these blocks are moved forward in the order, all that follow are placed anew, and an order that is no
higher is kept (iterated local search). Where this stops to help, it begins again: from the large blocks alone, packed
as low as they can be, with the others after them; or from blocks that are taken together in another way
(`checkmate.solvers.search.packing`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from checkmate.solvers.search.packing import WAYS, Part, contract, pack
from checkmate.solvers.search.skyline import Block

IntArray = npt.NDArray[np.int64]
PATIENCE = 25  # orders that are no lower, before it begins again
LARGE = (0.08, 0.04, 0.02, 0.01, 0.005)  # of the bound: a block that has as much is packed first
PACK_SECONDS = 0.3  # for the large blocks


def orders(data: IntArray) -> Iterator[IntArray]:
    """In which orders to place blocks: what is placed first has the choice."""
    born, died, size = data.T
    span = died - born
    yield np.lexsort((born, -size))
    yield np.lexsort((born, -size * span))
    yield np.lexsort((-size, -span))
    yield np.lexsort((-size, born))
    yield np.lexsort((-size, -died))


def first_fit(data: IntArray, order: IntArray, known: IntArray | None = None, since: int = 0) -> IntArray:
    """Each block, in this order, at the lowest address that is free for its whole life.

    Args:
        data: (N, 3) int64, each block's birth, death and size.
        order: (N,) int64.
        known: offsets, of which those of the first ``since`` blocks in this order are taken as they are.
    """
    ordered = data[order]
    born, died, size = ordered.T
    begins = np.zeros(len(data), dtype=np.int64)
    if known is not None:
        begins[:since] = known[order[:since]]
    ends = begins + size
    for k in range(since, len(order)):
        beside = np.flatnonzero((born[:k] < died[k]) & (died[:k] > born[k]))
        beside = beside[np.argsort(begins[beside])]
        floors = np.concatenate(([0], np.maximum.accumulate(ends[beside])))
        room = np.append(begins[beside], np.iinfo(np.int64).max) - floors
        begins[k] = floors[np.argmax(room >= size[k])]
        ends[k] = begins[k] + size[k]
    offsets = np.empty(len(data), dtype=np.int64)
    offsets[order] = begins
    return offsets


def reorder(blocks: Sequence[Block], bound: int, below: int, until: float, *, seed: int = 0) -> list[int] | None:
    """Offsets of an arena that is lower than ``below``, the lowest found; None if none was found.

    Args:
        blocks: each with when it is born, until before when it lives, and its size; all live, and have bytes.
        bound: bytes at which to stop, as the arena can be no lower.
        below: bytes.
        until: when to stop, by `time.perf_counter`.
        seed: for another search.

    >>> reorder([(0, 2, 64), (1, 3, 64), (2, 4, 64)], 128, 129, time.perf_counter() + 1)
    [0, 64, 0]
    """
    rng, attempt = random.Random(seed), 0
    best: list[int] | None = None
    whole = [Part(block, ((i, 0),)) for i, block in enumerate(blocks)]
    while below > bound and time.perf_counter() < until:
        large, contracted = divmod(attempt, 2)
        parts = contract(list(blocks), WAYS[large % len(WAYS)], rng) if contracted else whole
        data = np.array([part.block for part in parts], dtype=np.int64)
        begin = orders(data) if contracted else _large_first(data, LARGE[large % len(LARGE)] * bound, rng)
        attempt += 1
        offsets = _descend(data, list(begin), bound, until, rng)
        height = int((offsets + data[:, 2]).max())
        if height < below:
            below, best = height, _expand(parts, offsets, len(blocks))
    return best


def _large_first(data: IntArray, least: float, rng: random.Random) -> Iterator[IntArray]:
    """Orders of all blocks: first those of so many bytes, from the lowest that a search has placed to the highest."""
    born, died, size = data.T
    large = np.flatnonzero(size >= least)
    packed = _as_low_as_can_be(data[large], rng.randrange(1 << 30))
    others = np.flatnonzero(size < least)
    for key in (-size, -size * (died - born)):
        after = others[np.lexsort((born[others], key[others]))]
        yield np.concatenate([large[np.lexsort((-size[large], packed))], after])


def _as_low_as_can_be(data: IntArray, seed: int) -> IntArray:
    """Offsets of blocks at the height of their live peak; where these are not found soon, larger blocks come first."""
    change = np.zeros(int(data[:, 1].max(initial=0)) + 1, dtype=np.int64)
    np.add.at(change, data[:, 0], data[:, 2])
    np.add.at(change, data[:, 1], -data[:, 2])
    height = int(np.cumsum(change).max(initial=0))
    found = pack([tuple(row) for row in data.tolist()], height, time_limit=PACK_SECONDS, seed=seed).offsets
    return -data[:, 2] if found is None else np.array(found, dtype=np.int64)


def _descend(data: IntArray, begin: Sequence[IntArray], bound: int, until: float, rng: random.Random) -> IntArray:
    """From the best of some orders to lower ones, until no change has helped for some time."""

    def height(offsets: IntArray) -> int:
        return int((offsets + data[:, 2]).max())

    found = [(first_fit(data, order), order) for order in begin]
    offsets, order = min(found, key=lambda pair: height(pair[0]))
    tried = 0
    while tried < PATIENCE and height(offsets) > bound and time.perf_counter() < until:
        changed, since = _forward(data, offsets, order, bound, rng)
        other = first_fit(data, changed, offsets, since)
        tried = 0 if height(other) < height(offsets) else tried + 1
        if height(other) <= height(offsets):
            offsets, order = other, changed
    return offsets


def _forward(
    data: IntArray, offsets: IntArray, order: IntArray, bound: int, rng: random.Random
) -> tuple[IntArray, int]:
    """Another order, in which some of what sticks out goes before others, and from where on it differs."""
    ends = offsets + data[:, 2]
    over = bound + int(rng.random() * (ends.max() - bound))
    changed, since = order.tolist(), len(order)
    for block in np.flatnonzero(ends > over).tolist():
        at = changed.index(block)
        to = rng.randrange(at + 1)
        changed.insert(to, changed.pop(at))
        since = min(since, to)
    return np.array(changed, dtype=np.int64), since


def _expand(parts: Sequence[Part], offsets: IntArray, count: int) -> list[int]:
    """The offset of each block, from those of blocks that were taken together."""
    found = [0] * count
    for part, bottom in zip(parts, offsets.tolist(), strict=True):
        for i, offset in part.places:
            found[i] = bottom + offset
    return found
