"""Filling an arena from its floor up finds addresses wherever there are some, and proves where there are none."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from checkmate.solvers.addresses import Block, live_peak, overlaps
from checkmate.solvers.search import packing
from checkmate.solvers.search.packing import fill
from tests.support.blocks import NINE_ALIVE_TEN_NEEDED, cut_up, drawn, least_height
from tests.support.sampling import in_turn


@in_turn(seed=range(60))
def test_the_least_height_is_found_and_none_below(seed: int) -> None:
    """Small blocks over few moments, and a rectangle cut up, which leaves no room; in the usual order and another."""
    rng = random.Random(seed)
    blocks = drawn(rng, rng.randint(1, 6), moments=6) if seed % 2 else cut_up(rng, 6, moments=5, height=8)
    least = least_height(blocks)
    for order in (None, seed):
        found = fill(blocks, least, seed=order)
        assert found.offsets is not None
        assert not list(overlaps(blocks, found.offsets))
        assert max(offset + block.size for offset, block in zip(found.offsets, blocks, strict=True)) <= least
        assert min(found.offsets) >= 0
        below = fill(blocks, least - 1, seed=order)
        assert below.impossible
        assert below.offsets is None


@in_turn(seed=[None, 0, 1, 2])
def test_eight_blocks_need_more_than_is_ever_alive(seed: int | None) -> None:
    blocks = NINE_ALIVE_TEN_NEEDED
    assert live_peak(blocks) == 9
    assert fill(blocks, 9, seed=seed).impossible
    found = fill(blocks, 10, seed=seed)
    assert found.offsets is not None
    assert not list(overlaps(blocks, found.offsets))


@pytest.mark.slow
def test_that_these_need_more_is_so_in_every_order() -> None:
    assert least_height(NINE_ALIVE_TEN_NEEDED) == 10


def test_a_failure_does_not_try_again_what_was_decided_at_another_time() -> None:
    """Going back step by step, it takes thirty times as many decisions with easy blocks before and after."""
    sizes = (
        "0-1 5, 1-2 1, 1-2 4, 2-3 5, 0-4 8, 3-5 2, 4-5 5, 3-6 3, 4-6 2, 4-6 1, 5-6 1, 6-7 1, 5-8 6, 6-8 5, 7-8 1, 7-8 1"
    )
    hard = [Block(int(life[0]), int(life[2]), int(size)) for life, size in map(str.split, sizes.split(","))]
    easy = cut_up(random.Random(15453), 12, moments=6, height=13)
    around = [Block(born + begin, died + begin, size) for begin in (-10, 20) for born, died, size in easy]
    alone, together = fill(hard, 13, node_limit=1000), fill([*around[:12], *hard, *around[12:]], 13, node_limit=1000)
    assert alone.impossible
    assert together.impossible
    assert 100 < alone.nodes <= together.nodes < 2 * alone.nodes


def test_what_failed_before_is_remembered_when_all_has_failed() -> None:
    """The third decision failed at first because of the first one, which has another option; the second has no part."""
    arena: Any = SimpleNamespace(undo=lambda mark: None)
    path = [packing._Choice(options=[0, 1], reason=0, mark=0, tried=1) for _ in range(3)]
    assert packing._go_back(arena, path, 0b101)
    assert len(path) == 3
    path[2].tried = 2
    assert packing._go_back(arena, path, 0b100)
    assert len(path) == 1
    path[0].tried = 2
    assert not packing._go_back(arena, path, 0b001)
    assert path == []


def test_the_limit_ends_it_with_nothing_proven() -> None:
    blocks = cut_up(random.Random(0), 60, moments=30, height=500)
    found = fill(blocks, 500, node_limit=20)
    assert (found.offsets, found.impossible, found.nodes) == (None, False, 20)
    assert fill(blocks, 500, deadline=0.0).offsets is None
