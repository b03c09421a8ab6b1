"""Pack blocks below a height where first fit does not reach: contract them, then search for addresses many times.

Blocks that were made by cutting others up fit where these fitted. So two blocks of one size, one of which dies when the
other is born, are taken as one block that lives on; and blocks of one life as one of all their bytes. Contracted so, to
the end, a problem with little room to spare is often a tenth as large, and addresses of what is left are addresses of
all. There may be none although the problem has some: nothing is proven then, and every other time blocks of one life
are left as they are.

A search of this kind is over soon or never (heavy tails, Gomes et al. 2000). So there are many short ones, each with
other contractions and in another order, whose lengths follow Luby et al. (1993). Now and then a search of all blocks,
each time twice as long, can prove that there are no addresses.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from checkmate.solvers.search.skyline import Block, Packing, fill

NODES = 500  # decisions of the shortest searches, beside two for each block
SHARE_OF_PROOF = 0.2  # of all decisions, for searches of all blocks


def pack(
    blocks: Sequence[Block],
    capacity: int,
    *,
    time_limit: float = math.inf,
    node_limit: float = math.inf,
    seed: int = 0,
) -> Packing:
    """Find addresses below a height, or prove that there are none.

    Args:
        blocks: each with when it is born, until before when it lives, and its size.
        capacity: the height.
        time_limit: seconds.
        node_limit: decisions to try, in all searches together; with it, and without a time limit, what comes out is
            the same each time.
        seed: for another search.

    >>> pack([(0, 2, 64), (1, 3, 64), (2, 4, 64)], 128)
    Packing(offsets=(0, 64, 0), impossible=False, nodes=2)
    """
    deadline = time.perf_counter() + time_limit
    kept = [i for i, (born, died, size) in enumerate(blocks) if died > born and size > 0]
    unit = math.gcd(*(blocks[i][2] for i in kept)) or 1
    packing = _search(
        [(*blocks[i][:2], blocks[i][2] // unit) for i in kept], capacity // unit, deadline, node_limit, seed
    )
    if packing.offsets is None:
        return packing
    offsets = [0] * len(blocks)
    for i, offset in zip(kept, packing.offsets, strict=True):
        offsets[i] = offset * unit
    return Packing(tuple(offsets), impossible=False, nodes=packing.nodes)


def _search(blocks: list[Block], capacity: int, deadline: float, node_limit: float, seed: int) -> Packing:
    """Short searches of contracted problems, and now and then one of all blocks."""
    rng = random.Random(seed)
    nodes, attempt, proof = 0, 0, float(NODES + 2 * len(blocks))
    while True:
        parts = contract(blocks, rng, stack=attempt % 2 == 0)
        order = None if attempt == 0 and seed == 0 else rng.randrange(1 << 30)
        attempt += 1
        runs = [(parts, order, float(NODES + 2 * len(parts)) * _luby(attempt))]
        if attempt == 1 or nodes * SHARE_OF_PROOF > proof:
            runs.append((_alone(blocks), None, proof))
            proof *= 2
        for parts, order, limit in runs:
            contracted = [part.block for part in parts]
            limit = min(limit, node_limit - nodes)
            packing = fill(contracted, capacity, node_limit=limit, deadline=deadline, seed=order)
            nodes += packing.nodes
            if packing.offsets is not None:
                return Packing(_expand(parts, packing.offsets, len(blocks)), impossible=False, nodes=nodes)
            if packing.impossible and len(parts) == len(blocks):
                return Packing(None, impossible=True, nodes=nodes)
            if nodes >= node_limit or time.perf_counter() > deadline:
                return Packing(None, impossible=False, nodes=nodes)


def _luby(i: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8, ... for i = 1, 2, ..."""
    while i & (i + 1):
        i -= (1 << i.bit_length() - 1) - 1
    return (i + 1) // 2


@dataclass(frozen=True)
class Part:
    """Blocks taken as one, each with its place in it."""

    block: Block
    places: tuple[tuple[int, int], ...]  # (which block, offset)

    def then(self, other: Part) -> Part:
        """With another one in its place from when it dies."""
        return Part((self.block[0], other.block[1], self.block[2]), self.places + other.places)

    def below(self, other: Part) -> Part:
        """With another one of the same life on it."""
        born, died, size = self.block
        places = tuple((i, offset + size) for i, offset in other.places)
        return Part((born, died, size + other.block[2]), self.places + places)


def _alone(blocks: Sequence[Block]) -> list[Part]:
    return [Part(block, ((i, 0),)) for i, block in enumerate(blocks)]


def _expand(parts: Sequence[Part], offsets: Sequence[int], count: int) -> tuple[int, ...]:
    found = [0] * count
    for part, bottom in zip(parts, offsets, strict=True):
        for i, offset in part.places:
            found[i] = bottom + offset
    return tuple(found)


def contract(blocks: Sequence[Block], rng: random.Random, *, stack: bool) -> list[Part]:
    """Take blocks together, those of one life too if they are to be stacked, until there is nothing more to take."""
    parts, count = _alone(blocks), -1
    while len(parts) != count:
        count = len(parts)
        parts = _chain(parts, rng)
        if stack:
            parts = _stack(parts, rng)
    return parts


def _chain(parts: Sequence[Part], rng: random.Random) -> list[Part]:
    """Blocks of one size, each born when the one before dies."""
    ending: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.block[0]):
        born, died, size = part.block
        before = ending[born, size]
        if before:
            part = before.pop(rng.randrange(len(before))).then(part)
        ending[died, size].append(part)
    return [part for ends in ending.values() for part in ends]


def _stack(parts: Sequence[Part], rng: random.Random) -> list[Part]:
    """All blocks of one life, in any order."""
    lives: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in parts:
        lives[part.block[:2]].append(part)
    for group in lives.values():
        rng.shuffle(group)
    return [reduce(Part.below, group) for group in lives.values()]
