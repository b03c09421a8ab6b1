"""Rows as tables."""

from __future__ import annotations

from checkmate.core.answer import Table


def test_a_table_without_rows_is_its_head() -> None:
    assert str(Table(("a", "bc"))) == "a  bc"
    assert "<tbody></tbody>" in Table(("a",)).html()


def test_lines_have_no_trailing_spaces() -> None:
    assert str(Table(("a", "b"), [("1", "")], {"a"})).splitlines() == ["a  b", "1"]


def test_heads_and_cells_are_escaped() -> None:
    shown = Table(("a & b",), [("<i>",)]).html()
    assert "a &amp; b" in shown
    assert "&lt;i&gt;" in shown
