"""Addresses of blocks that live at the same time do not overlap, in an arena no higher than it must be."""

from __future__ import annotations

import random

import numpy as np
import pytest

from checkmate.solvers import addresses
from checkmate.solvers.addresses import Block, live_peak, overlaps, place_blocks
from tests.support.blocks import NINE_ALIVE_TEN_NEEDED, cut_up, drawn, least_height
from tests.support.sampling import in_turn


@in_turn(seed=range(30))
def test_no_lower_than_the_least_height(seed: int) -> None:
    blocks = drawn(random.Random(seed), 6, moments=12)
    placed, least = place_blocks(blocks), least_height(blocks)
    assert not list(overlaps(blocks, placed.offsets))
    assert placed.bound == least == placed.height
    assert placed.height == max(o + block.size for o, block in zip(placed.offsets, blocks, strict=True))


@in_turn(seed=range(20))
def test_hundreds_of_blocks(seed: int) -> None:
    blocks = drawn(random.Random(seed), 300, moments=60)
    placed = place_blocks(blocks, time_limit=0)
    assert not list(overlaps(blocks, placed.offsets))
    assert placed.bound == live_peak(blocks) <= placed.height <= sum(block.size for block in blocks)


@in_turn(seed=range(5))
def test_first_fit_puts_each_as_low_as_it_can_be(seed: int) -> None:
    blocks = drawn(random.Random(seed), 12, moments=8)
    data = np.array(blocks, dtype=np.int64)
    order = np.arange(len(blocks))
    offsets = addresses._first_fit(data, order).tolist()
    for i, block in enumerate(blocks):
        before = blocks[:i]
        free = [
            at
            for at in [0, *(offsets[j] + b.size for j, b in enumerate(before))]
            if not list(overlaps([*before, block], [*offsets[:i], at]))
        ]
        assert offsets[i] == min(free)


def test_the_live_peak_is_counted_moment_by_moment() -> None:
    blocks = drawn(random.Random(1), 40, moments=12)
    at = [sum(b.size for b in blocks if b.born <= t < b.died) for t in range(30)]
    assert live_peak(blocks) == max(at)


def test_nested_lives_need_no_more_than_the_live_peak() -> None:
    """Forward and backward of a chain: what is made first goes last."""
    blocks = [Block(t, 40 - t, 64 + t) for t in range(20)]
    assert place_blocks(blocks).gap == 0


def test_what_first_fit_leaves_open_is_searched() -> None:
    blocks = cut_up(random.Random(3), 100, moments=60, height=1 << 20)
    assert place_blocks(blocks, time_limit=0).height > 1.05 * (1 << 20)
    placed = place_blocks(blocks, time_limit=60)
    assert placed.height == placed.bound == 1 << 20
    assert not list(overlaps(blocks, placed.offsets))


def test_the_bound_is_raised_where_the_live_peak_is_proven_to_be_too_low() -> None:
    blocks = [block._replace(size=64 * block.size) for block in NINE_ALIVE_TEN_NEEDED]
    placed = place_blocks(blocks, time_limit=60)
    assert live_peak(blocks) == 9 * 64
    assert placed.height == placed.bound == 10 * 64
    assert not list(overlaps(blocks, placed.offsets))


def test_the_checker_sees_what_overlaps() -> None:
    blocks = [Block(0, 2, 10), Block(1, 3, 10), Block(2, 4, 10)]
    assert list(overlaps(blocks, [0, 9, 0])) == [(0, 1), (1, 2)]
    assert not list(overlaps(blocks, [0, 10, 0]))


@pytest.mark.parametrize("blocks", [[], [Block(0, 5, 0)], [Block(3, 3, 8)], [Block(0, 1, 0), Block(0, 0, 4)]])
def test_blocks_without_bytes_or_moments(blocks: list[Block]) -> None:
    placed = place_blocks(blocks)
    assert len(placed.offsets) == len(blocks)
    assert placed.height == placed.bound == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="dies before"):
        place_blocks([Block(0, 1, 8), Block(2, 1, 8)])
    with pytest.raises(ValueError, match="fewer bytes"):
        place_blocks([Block(0, 1, -8)])
