"""Addresses of blocks that live at the same time do not overlap, in an arena no higher than it must be."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from checkmate.solvers.addresses import Block, live_peak, overlaps, place


def _drawn(seed: int, count: int, moments: int = 12) -> list[Block]:
    rng = random.Random(seed)
    born = [rng.randrange(moments) for _ in range(count)]
    return [Block(b, b + rng.randint(1, moments // 2), rng.randint(1, 9)) for b in born]


def _lowest(blocks: list[Block]) -> int:
    """The least height: some order of lowest addresses has it, that in which they lie above each other."""
    heights = []
    for order in permutations(blocks):
        placed: list[tuple[Block, int]] = []
        for block in order:
            beside = [(o, other) for other, o in placed if other.born < block.died and block.born < other.died]
            places = [0, *(o + other.size for o, other in beside)]
            free = [p for p in places if all(p + block.size <= o or o + other.size <= p for o, other in beside)]
            placed.append((block, min(free)))
        heights.append(max(o + block.size for block, o in placed))
    return min(heights)


@pytest.mark.parametrize("seed", range(30))
def test_no_lower_than_the_least_height(seed: int) -> None:
    blocks = _drawn(seed, 6)
    placed, least = place(blocks), _lowest(blocks)
    assert not list(overlaps(blocks, placed.offsets))
    assert placed.bound <= least <= placed.height
    assert placed.height == max(o + block.size for o, block in zip(placed.offsets, blocks, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_hundreds_of_blocks(seed: int) -> None:
    blocks = _drawn(seed, 300, moments=60)
    placed = place(blocks, time_limit=0)
    assert not list(overlaps(blocks, placed.offsets))
    assert placed.bound == live_peak(blocks) <= placed.height <= sum(block.size for block in blocks)


def test_the_live_peak_is_counted_moment_by_moment() -> None:
    blocks = _drawn(1, 40)
    at = [sum(b.size for b in blocks if b.born <= t < b.died) for t in range(30)]
    assert live_peak(blocks) == max(at)


def test_nested_lives_need_no_more_than_the_live_peak() -> None:
    """Forward and backward of a chain: what is made first goes last."""
    blocks = [Block(t, 40 - t, 64 + t) for t in range(20)]
    assert place(blocks).gap == 0


def test_the_checker_sees_what_overlaps() -> None:
    blocks = [Block(0, 2, 10), Block(1, 3, 10), Block(2, 4, 10)]
    assert list(overlaps(blocks, [0, 9, 0])) == [(0, 1), (1, 2)]
    assert not list(overlaps(blocks, [0, 10, 0]))


@pytest.mark.parametrize("blocks", [[], [Block(0, 5, 0)], [Block(3, 3, 8)], [Block(0, 1, 0), Block(0, 0, 4)]])
def test_blocks_without_bytes_or_moments(blocks: list[Block]) -> None:
    placed = place(blocks)
    assert len(placed.offsets) == len(blocks)
    assert placed.bound == 0
    assert placed.gap <= 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="dies before"):
        place([Block(0, 1, 8), Block(2, 1, 8)])
    with pytest.raises(ValueError, match="fewer bytes"):
        place([Block(0, 1, -8)])
