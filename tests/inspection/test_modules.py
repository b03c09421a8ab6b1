"""Neighbours taken together: by hand, and what holds for every row."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.inspection.modules import fold

PATHS = st.lists(st.lists(st.sampled_from("abc"), max_size=4).map(".".join), max_size=30)
STAGES = ["stem.conv", "stem.norm", "body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm", "head"]


def _labels(paths: list[str], most: int, weights: list[int] | None = None) -> list[str]:
    return [label for label, _ in fold(paths, most, weights)]


def test_a_short_row_stays_as_it_is() -> None:
    assert _labels(["a.b", "", "a.b"], most=3) == ["a.b", "", "a.b"]
    assert _labels([], most=1) == []


def test_the_innermost_modules_go_first() -> None:
    assert _labels(STAGES, most=5) == ["stem.conv", "stem.norm", "body.0", "body.1", "head"]
    assert _labels(STAGES, most=4, weights=[2, 2, 1, 1, 1, 1, 2]) == ["stem", "body", "head"]


def test_a_module_that_holds_more_than_half_stays_apart() -> None:
    assert _labels(STAGES, most=4) == ["stem", "body.0", "body.1", "head"]


def test_many_equal_blocks_are_taken_together_evenly() -> None:
    blocks = [f"h.{i}.{part}" for i in range(16) for part in ("attn", "mlp")]
    assert _labels(blocks, most=10) == [f"h.{i}-{i + 1}" for i in range(0, 16, 2)]
    assert _labels(blocks[::-1], most=4) == ["h.15-12", "h.11-8", "h.7-4", "h.3-0"]
    assert _labels(["embed", *blocks, "head"], most=5)[0] == "embed - h.2"


def test_a_label_claims_no_more_than_its_group_holds() -> None:
    """The rest of ``down`` is elsewhere, and between ``raise.0`` and ``raise.1`` is something else."""
    paths = ["down.0", "pool", "down.1", "down.2", "raise.0", "up.0", "raise.1"]
    assert _labels(paths, most=3, weights=[2, 2, 2, 2, 1, 1, 1]) == ["down.0 - pool", "down.1-2", "raise.0 - raise.1"]


def test_ops_of_one_module_in_a_row_are_together_at_any_depth() -> None:
    assert _labels(["net", "net", "net", "net.h.0", "net.h.1"], most=3) == ["net", "net.h.0", "net.h.1"]


def test_what_has_no_module_is_named_by_what_it_stands_beside() -> None:
    assert _labels(["", "head", "body.1", "body.0", ""], most=2) == ["head", "body"]


def test_one_heavy_group_does_not_make_the_others_few() -> None:
    paths = ["heavy", *"abcdefgh"]
    assert _labels(paths, most=8, weights=[90, 1, 2, 3, 4, 5, 6, 7, 8]) == ["heavy", "a - b", *"cdefgh"]


def test_the_same_end_of_a_path_is_left_out() -> None:
    paths = [f"h.{i}.layer.{part}" for i in range(4) for part in ("a", "b")]
    assert _labels(paths, most=2) == ["h.0-1", "h.2-3"]
    assert _labels(["h.0.a", "h.0.b", "h.x", "h.1.a", "h.1.b", "h.1.c"], most=2) == ["h.0-x", "h.1"]


def test_what_has_no_module_in_common_is_named_by_its_ends() -> None:
    assert _labels(["a", "b", "", "c"], most=2) == ["a - b", "c"]


def test_most_is_a_number_of_groups() -> None:
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
