"""Other orders of first fit lower an arena, and never put two blocks upon each other."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from checkmate.solvers.addresses import live_peak, overlaps
from checkmate.solvers.search.reorder import first_fit, orders, reorder
from tests.support.blocks import cut_up, drawn


@pytest.mark.parametrize("seed", range(5))
def test_what_is_known_is_not_placed_again(seed: int) -> None:
    data = np.array(drawn(random.Random(seed), 60, moments=20), dtype=np.int64)
    for order in orders(data):
        offsets = first_fit(data, order)
        for since in (0, 1, 30, 60):
            assert (first_fit(data, order, offsets, since) == offsets).all()


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_puts_each_as_low_as_it_can_be(seed: int) -> None:
    blocks = drawn(random.Random(seed), 12, moments=8)
    data = np.array(blocks, dtype=np.int64)
    order = np.arange(len(blocks))
    offsets = first_fit(data, order).tolist()
    for i, block in enumerate(blocks):
        before = blocks[:i]
        free = [
            at
            for at in [0, *(offsets[j] + b.size for j, b in enumerate(before))]
            if not list(overlaps([*before, block], [*offsets[:i], at]))
        ]
        assert offsets[i] == min(free)


@pytest.mark.parametrize("seed", range(4))
def test_a_lower_arena_is_found(seed: int) -> None:
    blocks = cut_up(random.Random(seed), 60, moments=40, height=1 << 20)
    data = np.array(blocks, dtype=np.int64)
    before = min(int((first_fit(data, order) + data[:, 2]).max()) for order in orders(data))
    found = reorder(blocks, live_peak(blocks), before, time.perf_counter() + 3, seed=seed)
    assert found is not None
    assert not list(overlaps(blocks, found))
    assert max(offset + block.size for offset, block in zip(found, blocks, strict=True)) < before


def test_none_where_nothing_lower_is_found() -> None:
    blocks = drawn(random.Random(0), 30, moments=10)
    assert reorder(blocks, 0, live_peak(blocks), time.perf_counter() + 0.2) is None
