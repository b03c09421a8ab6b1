"""Rows as tables."""

from __future__ import annotations

from checkmate.core.table import html_table, text_table


def test_a_table_without_rows_is_its_head() -> None:
    assert text_table(("a", "bc"), [], set()) == "a  bc"
    assert "<tbody></tbody>" in html_table(("a",), [])


def test_lines_have_no_trailing_spaces() -> None:
    assert text_table(("a", "b"), [("1", "")], {"a"}).splitlines() == ["a  b", "1"]


def test_heads_and_cells_are_escaped() -> None:
    shown = html_table(("a & b",), [("<i>",)])
    assert "a &amp; b" in shown
    assert "&lt;i&gt;" in shown
