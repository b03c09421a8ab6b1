"""Neighbours taken together: by hand, and what holds for every row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.folding import fold

PATHS = st.lists(st.lists(st.sampled_from("abc"), max_size=4).map(".".join), max_size=30)


def _labels(paths: list[str], most: int) -> list[str]:
    return [group.label for group in fold(paths, most)]


def test_a_short_row_stays_as_it_is() -> None:
    assert _labels(["a.b", "", "a.b"], most=3) == ["a.b", "", "a.b"]


def test_the_innermost_modules_go_first() -> None:
    paths = ["stem.conv", "stem.norm", "body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm", "head"]
    assert _labels(paths, most=5) == ["stem.conv", "stem.norm", "body.0", "body.1", "head"]
    assert _labels(paths, most=4) == ["stem", "body", "head"]


def test_many_equal_blocks_are_taken_two_by_two() -> None:
    paths = ["embed", *(f"h.{i}.{part}" for i in range(16) for part in ("attn", "mlp")), "head"]
    assert _labels(paths, most=10) == ["embed", *(f"h.{i}-{i + 1}" for i in range(0, 16, 2)), "head"]
    assert _labels(paths[::-1], most=6) == ["head", "h.15-12", "h.11-8", "h.7-4", "h.3-0", "embed"]


def test_what_has_no_module_in_common_is_named_by_its_ends() -> None:
    assert _labels(["a", "b", "", "c"], most=2) == ["a - b", "c"]


def test_most_is_a_number_of_groups() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        fold(["a"], 0)


@given(PATHS, st.integers(1, 12))
def test_groups_are_a_partition_in_order(paths: list[str], most: int) -> None:
    groups = fold(paths, most)
    assert [i for group in groups for i in range(group.first, group.last + 1)] == list(range(len(paths)))
    assert len(groups) <= most
    assert sum(map(len, groups)) == len(paths)


@given(PATHS, st.integers(2, 12))
def test_a_row_that_is_long_enough_does_not_lose_more_than_asked_for(paths: list[str], most: int) -> None:
    assert len(fold(paths, most)) * 2 >= min(most, len(paths))
