"""Addresses below a height, found from the floor up or by taking blocks together: where there are some, and proofs."""

from __future__ import annotations

import csv
import random
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkmate.solvers.addresses import Block, live_peak, overlaps
from checkmate.solvers.search import packing
from checkmate.solvers.search.packing import contract, fill, pack
from tests.solvers.blocks import NINE_ALIVE_TEN_NEEDED, assert_within, cut_up, drawn, least_height
from tests.support.sampling import in_turn


@in_turn(seed=range(60))
def test_the_least_height_is_found_and_none_below(seed: int) -> None:
    """Small blocks over few moments, and a rectangle cut up, which leaves no room; in the usual order and another.

    By `pack` too: what is proven holds for the blocks as they are, not only as they were taken together.
    """
    rng = random.Random(seed)
    blocks = drawn(rng, rng.randint(1, 6), moments=6) if seed % 2 else cut_up(rng, 6, moments=5, height=8)
    least = least_height(blocks)
    for find in (fill, partial(fill, seed=seed), partial(pack, seed=seed)):
        assert_within(blocks, find(blocks, least).offsets, least)
        below = find(blocks, least - 1)
        assert (below.impossible, below.offsets) == (True, None)


@in_turn(seed=[None, 0, 1, 2])
def test_eight_blocks_need_more_than_is_ever_alive(seed: int | None) -> None:
    blocks = NINE_ALIVE_TEN_NEEDED
    assert live_peak(blocks) == 9
    assert fill(blocks, 9, seed=seed).impossible
    assert_within(blocks, fill(blocks, 10, seed=seed).offsets, 10)
    pages = [block._replace(size=4096 * block.size) for block in blocks]
    assert pack(pages, 10 * 4096 - 1).impossible
    assert_within(pages, pack(pages, 10 * 4096).offsets, 10 * 4096)


@pytest.mark.slow
def test_that_these_need_more_is_so_in_every_order() -> None:
    assert least_height(NINE_ALIVE_TEN_NEEDED) == 10


def _blocks(lives: str) -> list[Block]:
    """Blocks written as "born-died size, ..."."""
    return [Block(int(life[0]), int(life[2]), int(size)) for life, size in map(str.split, lives.split(","))]


def test_a_failure_does_not_try_again_what_was_decided_at_another_time() -> None:
    """Going back step by step, it takes thirty times as many decisions with easy blocks before and after."""
    hard = _blocks(
        "0-1 5, 1-2 1, 1-2 4, 2-3 5, 0-4 8, 3-5 2, 4-5 5, 3-6 3, 4-6 2, 4-6 1, 5-6 1, 6-7 1, 5-8 6, 6-8 5, 7-8 1, 7-8 1"
    )
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


CAPACITY = 1048576


def _read(name: str) -> list[Block]:
    with (Path(__file__).parent / "minimalloc" / f"{name}.{CAPACITY}.csv").open() as file:
        return [Block(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", "ABCDEF")
def test_problems_of_minimalloc_fit_their_capacity(name: str) -> None:
    """Public problems with no room to spare, on which first fit is a fifth and more above the capacity."""
    blocks = _read(name)
    assert live_peak(blocks) <= CAPACITY
    assert_within(blocks, pack(blocks, CAPACITY, node_limit=20_000).offsets, CAPACITY)


@in_turn(seed=range(4))
def test_a_rectangle_cut_into_two_hundred_fits_again(seed: int) -> None:
    blocks = cut_up(random.Random(seed), 200, moments=150, height=1 << 20)
    found = pack(blocks, 1 << 20, node_limit=20_000)
    assert_within(blocks, found.offsets, 1 << 20)
    assert found == pack(blocks, 1 << 20, node_limit=20_000)


@in_turn(stack=[True, False], seed=range(5))
def test_addresses_of_blocks_taken_together_are_addresses_of_all(stack: bool, seed: int) -> None:
    """Whatever is taken together: here each such block lies above the one before, so that no two of them overlap."""
    rng = random.Random(seed)
    blocks = cut_up(rng, 60, moments=20, height=300)
    parts = contract(blocks, rng, stack=stack)
    assert len(parts) < len(blocks)
    assert live_peak(Block(*part.block) for part in parts) == live_peak(blocks) == 300
    ends = [*accumulate((part.block[2] for part in parts), initial=0)]
    found = [(i, end + offset) for part, end in zip(parts, ends, strict=False) for i, offset in part.places]
    assert sorted(i for i, _ in found) == [*range(len(blocks))]
    assert not list(overlaps(blocks, [offset for _, offset in sorted(found)]))


def test_blocks_taken_together_wrongly_prove_nothing() -> None:
    """Some blocks are of one size by chance: taken together they do not fit, and apart they do."""
    blocks = _blocks(
        "0-1 1, 5-6 1, 1-2 1, 1-4 1, 2-5 1, 0-3 1, 3-6 1, 3-4 2, 2-6 2, 0-6 3, 0-1 4, 1-2 3, 4-6 3, 0-3 1, 2-3 1"
    )
    together = [part.block for part in contract(blocks, random.Random(0), stack=True)]
    assert fill(together, 10).impossible
    found = pack(blocks, 10)
    assert not found.impossible
    assert_within(blocks, found.offsets, 10)


def test_limits_end_it_with_nothing_proven_and_searches_are_as_long_as_luby_says() -> None:
    cut, hard = cut_up(random.Random(0), 60, moments=30, height=500), _read("F")
    for find, blocks, height, limit in ((fill, cut, 500, 20), (pack, hard, live_peak(hard), 600)):
        ended = find(blocks, height, node_limit=limit)
        assert (ended.offsets, ended.impossible, ended.nodes) == (None, False, limit)
    assert fill(cut, 500, deadline=0.0).offsets is None
    ended = pack(hard, live_peak(hard), time_limit=0)
    assert (ended.offsets, ended.impossible) == (None, False)
    luby = [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
    assert [packing._luby(i) for i in range(1, 16)] == luby
