"""Blocks to be placed in an arena: drawn, cut out of a rectangle that they fill, and the least height of a few."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

from checkmate.solvers.addresses import Block, overlaps

NINE_ALIVE_TEN_NEEDED = [  # at most 9 bytes are alive, but no placement is below 10
    *(Block(0, 1, 6), Block(0, 2, 3), Block(1, 3, 4), Block(2, 3, 2)),
    *(Block(1, 4, 2), Block(2, 4, 1), Block(3, 5, 6), Block(4, 5, 3)),
]


def assert_within(blocks: Sequence[Block], offsets: Sequence[int], height: int) -> None:
    """No two blocks that live at once share bytes, and all lie between the floor and the height."""
    assert not list(overlaps(blocks, offsets))
    assert min(offsets) >= 0
    assert max(offset + block.size for offset, block in zip(offsets, blocks, strict=True)) <= height


def drawn(rng: random.Random, count: int, moments: int, most: int = 9) -> list[Block]:
    """Blocks that live at random for up to half of the moments."""
    born = [rng.randrange(moments) for _ in range(count)]
    return [Block(b, b + rng.randint(1, moments // 2), rng.randint(1, most)) for b in born]


def cut_up(rng: random.Random, count: int, moments: int, height: int) -> list[Block]:
    """A rectangle in pieces, each cut through, the larger ones first: they fit at its height, and nothing is left."""
    pieces = [(0, moments, height)]
    while len(pieces) < count:
        pieces.sort(key=lambda piece: (piece[1] - piece[0]) * piece[2] * rng.random())
        born, died, size = pieces.pop()
        if rng.random() < 0.5 and died - born > 1:
            moment = rng.randint(born + 1, died - 1)
            pieces += [(born, moment, size), (moment, died, size)]
        elif size > 1:
            share = rng.randint(1, size - 1)
            pieces += [(born, died, share), (born, died, size - share)]
        else:
            pieces.append((born, died, size))
    rng.shuffle(pieces)
    return [Block(*piece) for piece in pieces]


def least_height(blocks: Sequence[Block]) -> int:
    """The least height of all orders of placing each block as low as it can be: the best placement has one of them."""
    least = sum(block.size for block in blocks)
    for order in permutations(blocks):
        placed: list[tuple[Block, int]] = []
        height = 0
        for block in order:
            beside = [(o, other) for other, o in placed if other.born < block.died and block.born < other.died]
            places = [0, *(o + other.size for o, other in beside)]
            free = [p for p in places if all(p + block.size <= o or o + other.size <= p for o, other in beside)]
            placed.append((block, min(free)))
            height = max(height, min(free) + block.size)
            if height >= least:
                break
        else:
            least = height
    return least
