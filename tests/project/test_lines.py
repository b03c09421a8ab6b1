"""The product stays as small as it was made."""

from __future__ import annotations

from tests.project.lines import MOST, ROOMS, by_folder


def test_the_product_has_no_more_lines_than_agreed() -> None:
    counts = by_folder()
    assert {folder.split("/")[0] for folder in counts} == {*ROOMS}
    assert counts.total() <= MOST
