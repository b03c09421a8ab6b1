"""Addresses of blocks that live at the same time do not overlap, in an arena no higher than it must be."""

from __future__ import annotations

import random

import numpy as np
import pytest

from checkmate.solvers import addresses
from checkmate.solvers.addresses import Block, live_peak, overlaps, place_blocks
from checkmate.solvers.search.packing import pack
from tests.solvers.blocks import NINE_ALIVE_TEN_NEEDED, assert_within, cut_up, drawn, least_height
from tests.support.sampling import in_turn


@in_turn(seed=range(30))
def test_no_lower_than_the_least_height(seed: int) -> None:
    blocks = drawn(random.Random(seed), 6, moments=12)
    placed = place_blocks(blocks)
    assert placed.bound == least_height(blocks) == placed.height
    assert_within(blocks, placed.offsets, placed.height)


@in_turn(seed=range(20))
def test_hundreds_of_blocks(seed: int) -> None:
    blocks = drawn(random.Random(seed), 300, moments=60)
    placed = place_blocks(blocks, time_limit=0)
    assert_within(blocks, placed.offsets, placed.height)
    assert placed.bound == live_peak(blocks) <= placed.height <= sum(block.size for block in blocks)


@in_turn(seed=range(5))
def test_first_fit_puts_each_as_low_as_it_can_be(seed: int) -> None:
    blocks = drawn(random.Random(seed), 12, moments=8)
    offsets = addresses._first_fit(np.array(blocks, dtype=np.int64), np.arange(len(blocks))).tolist()
    for i, block in enumerate(blocks):
        before = blocks[:i]
        places = [0, *(offsets[j] + b.size for j, b in enumerate(before))]
        assert offsets[i] == min(at for at in places if not list(overlaps([*before, block], [*offsets[:i], at])))


def test_the_live_peak_is_counted_moment_by_moment_and_the_checker_sees_what_overlaps() -> None:
    """Nested lives need no more: forward and backward of a chain, where what is made first goes last."""
    blocks = drawn(random.Random(1), 40, moments=12)
    assert live_peak(blocks) == max(sum(b.size for b in blocks if b.born <= t < b.died) for t in range(30))
    assert place_blocks([Block(t, 40 - t, 64 + t) for t in range(20)]).gap == 0
    blocks = [Block(0, 2, 10), Block(1, 3, 10), Block(2, 4, 10)]
    assert (live_peak(blocks), [*overlaps(blocks, [0, 9, 0])], [*overlaps(blocks, [0, 10, 0])]) == (
        20,
        [(0, 1), (1, 2)],
        [],
    )


def test_what_first_fit_leaves_open_is_searched() -> None:
    """The bound is raised where the live peak is proven to be too low."""
    blocks = cut_up(random.Random(3), 100, moments=60, height=1 << 20)
    assert place_blocks(blocks, time_limit=0).height > 1.05 * (1 << 20)
    pages = [block._replace(size=64 * block.size) for block in NINE_ALIVE_TEN_NEEDED]
    assert live_peak(pages) == 9 * 64
    for some, height in ((blocks, 1 << 20), (pages, 10 * 64)):
        placed = place_blocks(some, time_limit=60)
        assert placed.height == placed.bound == height
        assert_within(some, placed.offsets, height)


def test_blocks_without_bytes_or_moments_and_nonsense() -> None:
    for blocks in ([], [Block(0, 5, 0)], [Block(3, 3, 8)], [Block(0, 1, 0), Block(0, 0, 4)]):
        placed = place_blocks(blocks)
        assert (len(placed.offsets), placed.height, placed.bound) == (len(blocks), 0, 0)
        assert len(pack(blocks, 0).offsets) == len(blocks)
    blocks = [Block(0, 1, 0), Block(2, 2, 8), Block(0, 3, 5)]
    assert pack(blocks, 5).offsets[2] == 0
    assert pack(blocks, 4).impossible
    for wrong, says in ((Block(2, 1, 8), "dies before"), (Block(0, 1, -8), "fewer bytes")):
        with pytest.raises(ValueError, match=says):
            place_blocks([Block(0, 1, 8), wrong])
