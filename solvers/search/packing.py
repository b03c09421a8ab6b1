"""Pack blocks below a height that first fit does not reach: contract them, then search for addresses with restarts.

A search fills an arena of the height from its floor up (`fill`). Time is cut into sections at births and deaths, and
the level of a section is how far it is filled. If blocks fit at all, they fit so that each lies on the floor or on
another one. So take a valley of the levels, and a section of it: either one of the blocks that lie within the valley
covers the section on its bottom, or none does, and the bytes up to what comes next are lost there. A section can lose
no more than the arena has beyond all that is alive in it, its slack.

What fails at one time has little to do with what was decided at another. So each level knows the decisions that it
follows from, and a failure goes back to the last of those that it follows from (conflict-directed backjumping, Prosser
1993) instead of trying again all that was decided since. Sections that failed often are decided first (Boussemart et
al. 2004). MiniMalloc (Moffitt 2023) searches the same placements, the lowest address first, and goes back step by step.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import NamedTuple

Span = tuple[int, int, int]  # born, died (exclusive), size
NODES = 500  # decisions of the shortest searches, beside two for each block
SHARE_OF_PROOF = 0.2  # of all decisions, for searches of all blocks
NOISE = 0.3  # how far a random search departs from the usual order
CLOCK = 32  # nodes between looks at the clock


@dataclass(frozen=True)
class Packing:
    """The result of a search for addresses below a height."""

    offsets: tuple[int, ...] | None  # per block; None if none were found
    impossible: bool  # proven: there are none
    nodes: int  # decisions that were tried


def pack(
    blocks: Sequence[Span], capacity: int, *, time_limit: float = math.inf, node_limit: float = math.inf, seed: int = 0
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
    indices = [i for i, (born, died, size) in enumerate(blocks) if died > born and size > 0]
    unit = math.gcd(*(blocks[i][2] for i in indices)) or 1
    small = [(*blocks[i][:2], blocks[i][2] // unit) for i in indices]
    rng = random.Random(seed)
    nodes, attempt, proof = 0, 0, float(NODES + 2 * len(small))
    while True:
        # A short search of a contracted problem, and now and then one of all blocks.
        parts = contract(small, rng, stack=attempt % 2 == 0)
        order = None if attempt == 0 and seed == 0 else rng.randrange(1 << 30)
        attempt += 1
        runs = [(parts, order, float(NODES + 2 * len(parts)) * _luby(attempt))]
        if attempt == 1 or nodes * SHARE_OF_PROOF > proof:
            runs.append((_alone(small), None, proof))
            proof *= 2
        for parts, order, limit in runs:
            contracted = [part.block for part in parts]
            limit = min(limit, node_limit - nodes)
            packing = fill(contracted, capacity // unit, node_limit=limit, deadline=deadline, seed=order)
            nodes += packing.nodes
            if packing.offsets is not None:
                offsets = [0] * len(blocks)
                for part, bottom in zip(parts, packing.offsets, strict=True):
                    for i, offset in part.places:
                        offsets[indices[i]] = (bottom + offset) * unit
                return Packing(tuple(offsets), impossible=False, nodes=nodes)
            if packing.impossible and len(parts) == len(small):
                return Packing(None, impossible=True, nodes=nodes)
            if nodes >= node_limit or time.perf_counter() > deadline:
                return Packing(None, impossible=False, nodes=nodes)


def _luby(i: int) -> int:
    """The Luby sequence 1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8, ... for i = 1, 2, ..."""
    while i & (i + 1):
        i -= (1 << i.bit_length() - 1) - 1
    return (i + 1) // 2


@dataclass(frozen=True)
class Part:
    """Blocks merged into one, each with its offset in it."""

    block: Span
    places: tuple[tuple[int, int], ...]  # (which block, offset)


def _alone(blocks: Sequence[Span]) -> list[Part]:
    return [Part(block, ((i, 0),)) for i, block in enumerate(blocks)]


def contract(blocks: Sequence[Span], rng: random.Random, *, stack: bool) -> list[Part]:
    """Merge blocks: equal sizes one after the other in time; with ``stack`` also those of one life."""
    parts, count = _alone(blocks), -1
    while len(parts) != count:
        count = len(parts)
        # Blocks of one size, each born when the one before dies.
        ending: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
        for part in sorted(parts, key=lambda part: part.block[0]):
            born, died, size = part.block
            before = ending[born, size]
            if before:
                first = before.pop(rng.randrange(len(before)))
                part = Part((first.block[0], died, size), first.places + part.places)
            ending[died, size].append(part)
        parts = [part for ends in ending.values() for part in ends]
        if not stack:
            continue
        # All blocks of one life, in any order, one upon the other.
        lives: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
        for part in parts:
            lives[part.block[:2]].append(part)
        parts = []
        for (born, died), group in lives.items():
            rng.shuffle(group)
            height, places = 0, list[tuple[int, int]]()
            for part in group:
                places += ((i, offset + height) for i, offset in part.places)
                height += part.block[2]
            parts.append(Part((born, died, height), tuple(places)))
    return parts


_Urgency = tuple[float, int, int, int]  # options for the times it failed, level, slack, section: the least comes first


class _Valley(NamedTuple):
    """Adjacent sections of one level between higher ones; one of them is decided next."""

    begin: int
    end: int
    section: int


@dataclass
class _Choice:
    """A decision: the block that covers a section on the bottom of its valley, or none."""

    options: list[int]  # blocks; ~section: none does
    reason: int  # decisions because of which there are no other options, and those that had failed did
    mark: int  # how long the trail was
    tried: int = 0


def fill(
    blocks: Sequence[Span],
    capacity: int,
    *,
    node_limit: float = math.inf,
    deadline: float = math.inf,
    seed: int | None = None,
) -> Packing:
    """Find addresses below a height, or prove that there are none.

    Args:
        blocks: each with a life and a size above 0.
        capacity: of the arena.
        node_limit: decisions to try.
        deadline: of `time.perf_counter`.
        seed: another search for each; None is the usual order.

    >>> fill([(0, 2, 2), (1, 3, 1), (2, 4, 2)], 3).offsets, fill([(0, 2, 2), (1, 3, 1)], 2).impossible
    ((0, 2, 0), True)
    """
    arena = _Arena(blocks, capacity, seed)
    if any(slack < 0 for slack in arena.slack):
        return Packing(None, impossible=True, nodes=0)
    path: list[_Choice] = []
    nodes = 0
    while arena.left:
        outcome = arena.scan()
        if isinstance(outcome, _Valley):
            path.append(arena.choice(outcome))
        elif not _go_back(arena, path, outcome):
            return Packing(None, impossible=True, nodes=nodes)
        if nodes >= node_limit or (nodes % CLOCK == 0 and time.perf_counter() > deadline):
            return Packing(None, impossible=False, nodes=nodes)
        nodes += 1
        choice = path[-1]
        arena.decide(choice.options[choice.tried], 1 << len(path) - 1)
        choice.tried += 1
    return Packing(tuple(arena.offsets), impossible=False, nodes=nodes)


def _go_back(arena: _Arena, path: list[_Choice], reason: int) -> bool:
    """Backtrack to the last decision that shares in the failure and has another option; tell whether there is one."""
    while path:
        choice = path[-1]
        arena.undo(choice.mark)
        own = 1 << len(path) - 1
        if reason & own:
            choice.reason |= reason & ~own
            if choice.tried < len(choice.options):
                return True
            reason = choice.reason
        path.pop()
    return False


class _Arena:
    """The levels of all sections with their blocks, and the decisions behind them."""

    def __init__(self, blocks: Sequence[Span], capacity: int, seed: int | None) -> None:
        moments = sorted({moment for born, died, _ in blocks for moment in (born, died)})
        at = {moment: section for section, moment in enumerate(moments)}
        rng = random.Random(seed)
        noise = 0.0 if seed is None else NOISE
        self.begin = [at[born] for born, _, _ in blocks]
        self.end = [at[died] for _, died, _ in blocks]
        self.size = [size for _, _, size in blocks]
        self.value = [  # sections times bytes: what is large comes first
            (end - begin) * size * (1 + noise * rng.random())
            for begin, end, size in zip(self.begin, self.end, self.size, strict=True)
        ]
        self.left = len(blocks)
        self.offsets = [-1] * self.left
        count = max(0, len(moments) - 1)
        self.born: list[list[int]] = [[] for _ in range(count)]  # blocks that are not placed yet, by first section
        self.need = [0] * count  # bytes of these in each section
        for i, section in enumerate(self.begin):
            self.born[section].append(i)
            for covered in range(section, self.end[i]):
                self.need[covered] += self.size[i]
        self.top = 2 * capacity + 2  # the level of a section that nothing more goes into
        self.level = [0 if need else self.top for need in self.need]
        self.slack = [capacity - need for need in self.need]  # bytes that may still be lost
        self.closed = [False] * count  # decided: no other block covers the section on the bottom of its valley
        self.reason = [0] * count  # the decisions that all this follows from
        self.weight = [1 + noise * rng.random() for _ in range(count)]  # how often the section failed
        self.trail: list[tuple[int, ...]] = []
        self.fewest: dict[int, tuple[_Urgency, _Valley]] = {}  # for each valley, by its first section
        self.changed: tuple[int, int] | None = (0, count) if count else None  # sections, since the last scan

    def scan(self) -> _Valley | int:
        """Raise valleys that nothing fits into, and find the section with the fewest options.

        Where some section cannot be filled any more: the decisions that have a part in it, as bits.
        Only where something has changed since the last scan is it looked at again.
        """
        level, count = self.level, len(self.level)
        while self.changed is not None:
            # Widen what has changed by all sections of the levels on both sides.
            begin, end = self.changed
            beside = level[begin - 1] if begin > 0 else -1
            while begin > 0 and level[begin - 1] == beside:
                begin -= 1
            beside = level[end] if end < count else -1
            while end < count and level[end] == beside:
                end += 1
            self.changed = begin, end
            for section in range(begin, end):
                self.fewest.pop(section, None)
            for first, last, rim in self._valleys(begin, end):
                options = self._options(first, last)
                if options is None:
                    # Give the valley up: what comes next there lies at its rim or above, so that levels are others.
                    lost, reason = rim - level[first], self._because(first, last)
                    for section in range(first, last):
                        if self.slack[section] < lost:
                            self.weight[section] += 1
                            return reason
                    for section in range(first, last):
                        self._set(section, rim, self.slack[section] - lost, False, reason)
                    break
                # Find the section of the valley that is to be decided first.
                least: _Urgency = (math.inf, 0, 0, first)
                for section, blocks in enumerate(options, first):
                    if self.closed[section]:
                        continue
                    slack = self.slack[section]
                    ways = blocks + (slack > 0)
                    if not ways:
                        self.weight[section] += 1
                        return self._because(first, last)
                    if blocks:
                        urgency = 1.0 if ways == 1 else 2 + ways / self.weight[section]
                        least = min(least, (urgency, level[section], slack, section))
                self.fewest[first] = least, _Valley(first, last, least[-1])
            else:
                self.changed = None
        return min(self.fewest.values())[1]  # the lowest section that needs more is in a valley

    def choice(self, valley: _Valley) -> _Choice:
        """The blocks that may cover a section on the bottom of its valley, the likeliest first."""
        first, last = valley.section, valley.section + 1
        while first > valley.begin and not self.closed[first - 1]:
            first -= 1
        while last < valley.end and not self.closed[last]:
            last += 1
        fitting = [
            i for t in range(first, valley.section + 1) for i in self.born[t] if valley.section < self.end[i] <= last
        ]
        rims = {self._rim(valley.begin - 1), self._rim(valley.end)}
        bottom = self.level[valley.begin]

        def rank(i: int) -> tuple[bool, float]:
            beside = self.begin[i] == valley.begin or self.end[i] == valley.end
            return not (beside and bottom + self.size[i] in rims), -self.value[i]

        options = sorted(fitting, key=rank)
        if self.slack[valley.section] > 0:
            options.append(~valley.section)
        return _Choice(options, self._because(valley.begin, valley.end), len(self.trail))

    def decide(self, option: int, decision: int) -> None:
        """Place a block on the bottom of its valley, or none on a section."""
        if option < 0:
            section = ~option
            self._set(section, self.level[section], self.slack[section], True, self.reason[section] | decision)
            return
        begin, end, size = self.begin[option], self.end[option], self.size[option]
        self.offsets[option] = self.level[begin]
        level, reason = self.level[begin] + size, reduce(or_, self.reason[begin:end], decision)
        for section in range(begin, end):
            self.need[section] -= size
            self._set(section, level if self.need[section] else self.top, self.slack[section], False, reason)
        self.born[begin].remove(option)
        self.left -= 1
        self.trail.append((option,))

    def undo(self, mark: int) -> None:
        """Undo changes back to this length of the trail."""
        while len(self.trail) > mark:
            entry = self.trail.pop()
            if len(entry) == 1:
                (block,) = entry
                self.left += 1
                self.born[self.begin[block]].append(block)
                for section in range(self.begin[block], self.end[block]):
                    self.need[section] += self.size[block]
                continue
            section, self.level[section], self.slack[section], closed, self.reason[section] = entry
            self.closed[section] = bool(closed)
            self._touch(section)

    def _set(self, section: int, level: int, slack: int, closed: bool, reason: int) -> None:
        before = (section, self.level[section], self.slack[section], self.closed[section], self.reason[section])
        self.trail.append(before)
        self.level[section], self.slack[section] = level, slack
        self.closed[section], self.reason[section] = closed, reason
        self._touch(section)

    def _touch(self, section: int) -> None:
        begin, end = self.changed or (section, section + 1)
        self.changed = min(begin, section), max(end, section + 1)

    def _rim(self, section: int) -> int:
        return self.level[section] if 0 <= section < len(self.level) else self.top

    def _valleys(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The valleys, lower than both sides: first section, last exclusive, and the lower side's level."""
        level, left = self.level, self._rim(begin - 1)
        while begin < end:
            bottom, after = level[begin], begin + 1
            while after < end and level[after] == bottom:
                after += 1
            right = self._rim(after)
            if left > bottom < right:
                yield begin, after, min(left, right)
            begin, left = after, bottom

    def _options(self, begin: int, end: int) -> list[int] | None:
        """The number of blocks that may cover each section on the bottom of a valley; None if none may anywhere."""
        change = [0] * (end - begin + 1)
        last = end
        for section in range(end - 1, begin - 1, -1):
            if self.closed[section]:
                last = section
                continue
            for i in self.born[section]:
                if self.end[i] <= last:
                    change[section - begin] += 1
                    change[self.end[i] - begin] -= 1
        return [*accumulate(change[:-1])] if any(change) else None

    def _because(self, begin: int, end: int) -> int:
        """The decisions that shaped a valley, its rims included."""
        return reduce(or_, self.reason[max(begin - 1, 0) : end + 1], 0)
