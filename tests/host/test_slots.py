"""Free bytes of a second memory: none are lost, whatever is taken and given in whatever order."""

from __future__ import annotations

import random

from checkmate.host.slots import BLOCK, Run, Slots, rounded


def test_a_value_lies_in_pieces_where_no_gap_holds_it() -> None:
    slots = Slots(5 * BLOCK)
    values = [slots.take(BLOCK) for _ in range(5)]
    slots.give(values[0])
    slots.give(values[2])
    slots.give(values[3])
    assert slots.take(2 * BLOCK) == (Run(2 * BLOCK, 2 * BLOCK),)
    slots.give(values[4])
    assert slots.take(2 * BLOCK) == (Run(0, BLOCK), Run(4 * BLOCK, BLOCK))
    assert slots.take(1) is None
    assert slots.take(0) == ()


def test_any_order_finds_room_for_as_many_bytes_as_there_are() -> None:
    draw = random.Random(0)
    for capacity in (0, 1, 7 * BLOCK, 40 * BLOCK):
        slots, taken = Slots(capacity), []
        for _ in range(400):
            if taken and draw.random() < 0.5:
                slots.give(taken.pop(draw.randrange(len(taken))))
                continue
            nbytes, free = draw.randrange(6 * BLOCK), slots.free
            runs = slots.take(nbytes)
            assert (runs is None) == (rounded(nbytes) > free)
            if runs is not None:
                assert sum(run.nbytes for run in runs) == rounded(nbytes)
                taken.append(runs)
            blocks = [b for runs in taken for run in runs for b in range(run.begin, run.end, BLOCK)]
            assert len(blocks) == len({*blocks}) == (slots.capacity - slots.free) // BLOCK
            assert all(0 <= block < slots.capacity for block in blocks)
        for runs in taken:
            slots.give(runs)
        assert slots.take(capacity) == ((Run(0, rounded(capacity)),) if capacity else ())
