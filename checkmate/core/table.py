"""Rows as a text table, as HTML and as a data frame."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> str:
    """Columns as wide as needed, two spaces apart; those of ``numbers`` to the right.

    >>> print(text_table(("name", "n"), [("a", "1"), ("longer", "23")], {"n"}))
    name     n
    a        1
    longer  23
    """
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.rjust if head in numbers else str.ljust for head in heads]
    aligned = ([pad(c, w) for pad, c, w in zip(align, line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as an HTML table, the text escaped.

    >>> html_table(("n",), [("<",)])
    '<table><thead><tr><th>n</th></tr></thead><tbody><tr><td>&lt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def data_frame(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """The records as a ``pandas.DataFrame``.

    Raises:
        ImportError: if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install pandas. Without it there is records().") from error
    return pandas.DataFrame(records)
