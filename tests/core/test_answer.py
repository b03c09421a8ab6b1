"""Rows as tables."""

from __future__ import annotations

from checkmate.core.answer import Column, Table, table


def test_tables_as_text_and_html() -> None:
    assert str(Table(("a", "bc"))) == "a  bc"
    assert "<tbody></tbody>" in Table(("a",)).html()
    assert str(Table(("a", "b"), [("1", "")], {"a"})).splitlines() == ["a  b", "1"]  # no spaces at the end
    shown = Table(("a & b",), [("<i>",)]).html()
    assert "a &amp; b" in shown
    assert "&lt;i&gt;" in shown


def test_a_column_writes_numbers_and_takes_texts_as_they_are() -> None:
    half = Column("half", lambda n: n / 2 if n else "none", "{:.1f} B".format)
    assert [half.text(n) for n in (3, 0, float("inf"))] == ["1.5 B", "none", "-"]
    assert [half.key(n) for n in (3, 0, float("inf"))] == [1.5, None, None]
    named = Column("name", lambda n: None if n < 0 else f"n{n}", sort=lambda n: -n)
    assert [(named.text(n), named.key(n)) for n in (3, -1)] == [("n3", -3), ("-", 1)]
    assert table([named, half], [3, 0]) == Table(["name", "half"], [["n3", "1.5 B"], ["n0", "none"]], {"half"})


def test_rows_left_out_are_counted_and_summed() -> None:
    columns = [
        Column("n", "real", str),
        Column("sum", "real", "{:.0f} B".format, total=True),
        Column("again", "real", str),
    ]
    assert table(columns, [1, 2, 3], top=1).rows == [["1", "1 B", "1"], ["... and 2 more", "5 B", ""]]
    assert table(columns, [1], top=1).rows == [["1", "1 B", "1"]]
