"""Addresses below a height, found by taking blocks together: where there are some, and never a proof of too much."""

from __future__ import annotations

import csv
import random
from itertools import accumulate
from pathlib import Path

import pytest

from checkmate.solvers.addresses import Block, live_peak, overlaps
from checkmate.solvers.search import packing
from checkmate.solvers.search.packing import contract, fill, pack
from tests.support.blocks import NINE_ALIVE_TEN_NEEDED, cut_up, drawn, least_height
from tests.support.sampling import in_turn

MINIMALLOC = sorted((Path(__file__).parent / "minimalloc").glob("*.csv"))


def _read(path: Path) -> list[Block]:
    with path.open() as file:
        return [Block(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


@in_turn(seed=range(40))
def test_the_least_height_is_found_and_none_below(seed: int) -> None:
    """What is proven holds for the blocks as they are, not only as they were taken together."""
    rng = random.Random(seed)
    blocks = drawn(rng, rng.randint(1, 6), moments=6) if seed % 2 else cut_up(rng, 6, moments=5, height=8)
    least = least_height(blocks)
    found = pack(blocks, least, seed=seed)
    assert found.offsets is not None
    assert not list(overlaps(blocks, found.offsets))
    assert max(offset + block.size for offset, block in zip(found.offsets, blocks, strict=True)) <= least
    assert pack(blocks, least - 1, seed=seed).impossible


def test_a_height_that_is_alive_but_not_enough() -> None:
    pages = [block._replace(size=4096 * block.size) for block in NINE_ALIVE_TEN_NEEDED]
    assert pack(pages, 10 * 4096 - 1).impossible
    found = pack(pages, 10 * 4096)
    assert found.offsets is not None
    assert not list(overlaps(pages, found.offsets))


@pytest.mark.parametrize("path", MINIMALLOC, ids=lambda path: path.name[0])
def test_problems_of_minimalloc_fit_their_capacity(path: Path) -> None:
    """Public problems with no room to spare, on which first fit is a fifth and more above the capacity."""
    blocks, capacity = _read(path), int(path.name.split(".")[1])
    assert live_peak(blocks) <= capacity
    found = pack(blocks, capacity, node_limit=20_000)
    assert found.offsets is not None
    assert not list(overlaps(blocks, found.offsets))
    assert max(offset + block.size for offset, block in zip(found.offsets, blocks, strict=True)) <= capacity


def test_all_six_problems_are_there() -> None:
    assert [path.name[0] for path in MINIMALLOC] == [*"ABCDEF"]


@in_turn(seed=range(4))
def test_a_rectangle_cut_into_two_hundred_fits_again(seed: int) -> None:
    blocks = cut_up(random.Random(seed), 200, moments=150, height=1 << 20)
    found = pack(blocks, 1 << 20, node_limit=20_000)
    assert found.offsets is not None
    assert not list(overlaps(blocks, found.offsets))
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
    """Some are of one size by chance: as one block they leave no way, and there is one."""
    lives = "0-1 1, 5-6 1, 1-2 1, 1-4 1, 2-5 1, 0-3 1, 3-6 1, 3-4 2, 2-6 2, 0-6 3, 0-1 4, 1-2 3, 4-6 3, 0-3 1, 2-3 1"
    blocks = [Block(int(life[0]), int(life[2]), int(size)) for life, size in map(str.split, lives.split(","))]
    together = [part.block for part in contract(blocks, random.Random(0), stack=True)]
    assert fill(together, 10).impossible
    found = pack(blocks, 10)
    assert found.offsets is not None
    assert not found.impossible
    assert not list(overlaps(blocks, found.offsets))


def test_blocks_without_bytes_or_moments_lie_anywhere() -> None:
    blocks = [Block(0, 1, 0), Block(2, 2, 8), Block(0, 3, 5)]
    found = pack(blocks, 5)
    assert found.offsets is not None
    assert found.offsets[2] == 0
    assert pack([], 0).offsets == ()
    assert pack(blocks, 4).impossible


def test_limits_end_it_with_nothing_proven() -> None:
    blocks = _read(MINIMALLOC[-1])
    ended = pack(blocks, live_peak(blocks), node_limit=600)
    assert (ended.offsets, ended.impossible, ended.nodes) == (None, False, 600)
    ended = pack(blocks, live_peak(blocks), time_limit=0)
    assert (ended.offsets, ended.impossible) == (None, False)


def test_searches_are_as_long_as_luby_says() -> None:
    assert [packing._luby(i) for i in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
