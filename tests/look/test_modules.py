"""Neighbours taken together: by hand, and what holds for every row."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.look.timeline import fold
from tests.support.sampling import in_turn

PATHS = st.lists(st.lists(st.sampled_from("abc"), max_size=4).map(".".join), max_size=30)
STAGES = ["stem.conv", "stem.norm", "body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm", "head"]
BLOCKS = [f"h.{i}.{part}" for i in range(16) for part in ("attn", "mlp")]
DOWN = ["down.0", "pool", "down.1", "down.2", "raise.0", "up.0", "raise.1"]
LAYERS = [f"h.{i}.layer.{part}" for i in range(4) for part in ("a", "b")]
HEAVY = [2, 2, 2, 2, 1, 1, 1]
NET = ["net", "net", "net", "net.h.0", "net.h.1"]
ONES = ["heavy", *"abcdefgh"]
UNLIKE = ["h.0.a", "h.0.b", "h.x", "h.1.a", "h.1.b", "h.1.c"]
LABELS: dict[str, tuple[list[str], int, list[int] | None, list[str]]] = {
    "a short row stays as it is": (["a.b", "", "a.b"], 3, None, ["a.b", "", "a.b"]),
    "nothing": ([], 1, None, []),
    "innermost first": (STAGES, 5, None, ["stem.conv", "stem.norm", "body.0", "body.1", "head"]),
    "innermost first, by weight": (STAGES, 4, [2, 2, 1, 1, 1, 1, 2], ["stem", "body", "head"]),
    "more than half stays apart": (STAGES, 4, None, ["stem", "body.0", "body.1", "head"]),
    "equal blocks, evenly": (BLOCKS, 10, None, [f"h.{i}-{i + 1}" for i in range(0, 16, 2)]),
    "equal blocks, backwards": (BLOCKS[::-1], 4, None, ["h.15-12", "h.11-8", "h.7-4", "h.3-0"]),
    # the rest of down is elsewhere, and between raise.0 and raise.1 is something else
    "a label claims no more than its group": (DOWN, 3, HEAVY, ["down.0 - pool", "down.1-2", "raise.0 - raise.1"]),
    "one module in a row is together at any depth": (NET, 3, None, ["net", "net.h.0", "net.h.1"]),
    "no module, by its neighbour": (["", "head", "body.1", "body.0", ""], 2, None, ["head", "body"]),
    "one heavy group does not make the others few": (ONES, 8, [90, *range(1, 9)], ["heavy", "a - b", *"cdefgh"]),
    "the same end is left out": (LAYERS, 2, None, ["h.0-1", "h.2-3"]),
    "the same end is left out, unlike names": (UNLIKE, 2, None, ["h.0-x", "h.1"]),
    "nothing in common, by its ends": (["a", "b", "", "c"], 2, None, ["a - b", "c"]),
}


@in_turn(name=LABELS)
def test_labels(name: str) -> None:
    paths, most, weights, labels = LABELS[name]
    assert [label for label, _ in fold(paths, most, weights)] == labels


def test_the_first_block_is_taken_together_with_what_stands_before() -> None:
    assert fold(["embed", *BLOCKS, "head"], 5)[0][0] == "embed - h.2"
    with pytest.raises(ValueError, match="at least 1, not 0"):
        fold(["a"], 0)


@given(PATHS, st.integers(1, 12))
def test_groups_are_a_partition_in_order(paths: list[str], most: int) -> None:
    groups = [part for _, part in fold(paths, most)]
    assert [i for part in groups for i in part] == list(range(len(paths)))
    assert len(groups) <= most
    assert sum(map(len, groups)) == len(paths)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_without_modules_the_heaviest_group_is_as_light_as_it_can_be(weights: list[int], most: int) -> None:
    """Where it is not, the lightest were taken together, into as many groups as may be."""
    n = len(weights)
    cuts = [c for few in range(min(most, n)) for c in combinations(range(1, n), few)]
    lightest = min(max(sum(weights[a:b]) for a, b in zip((0, *c), (*c, n), strict=True)) for c in cuts)
    groups = fold([""] * n, most, weights)
    heaviest = max(sum(weights[i] for i in part) for _, part in groups)
    assert n <= most or heaviest == lightest or (heaviest > lightest and len(groups) == most)
