"""Answers as text, HTML, data frames and page data: title, facts, tables, a picture.

In a notebook it is HTML without scripts and without network, whose lines and words have the notebook's own colour, so
that they are read on light paper and on dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]


@dataclass(frozen=True)
class Table:
    """Rows of text under heads, columns as wide as needed, ``numbers`` right-aligned.

    >>> print(Table(("name", "n"), [("a", "1"), ("longer", "23")], {"n"}))
    name     n
    a        1
    longer  23
    >>> Table(("n",), [("<",)]).html()
    '<table><thead><tr><th>n</th></tr></thead><tbody><tr><td>&lt;</td></tr></tbody></table>'
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    numbers: Collection[str] = ()
    title: str = ""

    def __str__(self) -> str:
        lines = [self.heads, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        align = [str.rjust if head in self.numbers else str.ljust for head in self.heads]
        aligned = ([pad(c, w) for pad, c, w in zip(align, line, widths, strict=True)] for line in lines)
        titles = [self.title] if self.title else []
        return "\n".join(titles + ["  ".join(cells).rstrip() for cells in aligned])

    def markdown(self) -> str:
        r"""Format the table as Markdown, without its title; pipes and tags are escaped.

        >>> print(Table(("name", "n"), [("a|b", "1")], {"n"}).markdown())
        | name | n |
        |---|--:|
        | a\|b | 1 |
        """
        rule = "|".join("--:" if head in self.numbers else "---" for head in self.heads)
        escaped = ([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in self.rows)
        head, *rows = (f"| {' | '.join(row)} |" for row in (self.heads, *escaped))
        return "\n".join([head, f"|{rule}|", *rows])

    def html(self) -> str:
        """Format the table as HTML, the text escaped."""
        title = Table((self.title,)).html() if self.title else ""
        head = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


Get = str | Callable[[Any], Any]  # the name of a row's field, or a function of the row


@dataclass(frozen=True)
class Column:
    """A head, and the cell for each row: text, or a number that ``show`` formats.

    Numbers stand to the right, and a page sorts by them. None, and a number that is not finite, is "-"; a text in the
    place of a number is written as it is.
    """

    head: str
    get: Get
    show: Callable[[Any], str] | None = None  # None: the cells are texts
    sort: Get | None = None  # the number that a page sorts by in place of a text
    total: bool = False  # of rows that are left out, the sum is shown

    def text(self, row: Any) -> str:
        """The cell of a row."""
        value = _value(row, self.get)
        if value is None:
            return "-"
        return str(value) if self.show is None or isinstance(value, str) else self.show(value)

    def key(self, row: Any) -> float | None:
        """The number that a row sorts by; None: none, and the row goes last."""
        value = _value(row, self.sort or self.get)
        return None if isinstance(value, str) else value


def _value(row: Any, get: Get) -> Any:
    value = getattr(row, get) if isinstance(get, str) else get(row)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(columns: Sequence[Column], rows: Sequence[Any], *, top: int | None = None, title: str = "") -> Table:
    """The table of the first rows, with a last row that counts the rest.

    >>> print(table([Column("name", str.title), Column("length", len, str, total=True)], ["ann", "bob", "cy"], top=1))
    name            length
    Ann                  3
    ... and 2 more       5
    """
    cells, left = [[column.text(row) for column in columns] for row in rows[:top]], rows[len(rows[:top]) :]
    if left:
        sums = (c.show(sum(_value(row, c.get) for row in left)) if c.total and c.show else "" for c in columns[1:])
        cells.append([f"... and {len(left)} more", *sums])
    return Table([c.head for c in columns], cells, {c.head for c in columns if c.show}, title)


@dataclass(frozen=True)
class Notes(Table):
    """A table of two columns with long texts: as text, one below the other."""

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {first}\n    {second}" for first, second in self.rows)])


def facts_html(title: str, facts: Sequence[tuple[str, str]]) -> str:
    """A title and named facts as HTML, the text escaped.

    >>> facts_html("a < b", [("peak", "4 B")])
    '<div><strong>a &lt; b</strong></div><table><tbody><tr><td>peak</td><td>4 B</td></tr></tbody></table>'
    """
    above = f"<div><strong>{html.escape(title)}</strong></div>" if title else ""
    rows = (f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in facts)
    return above + (f"<table><tbody>{''.join(rows)}</tbody></table>" if facts else "")


WIDE, TALL, ROOM = 520, 110, 18  # units of a picture, which scales: of what is drawn, and of words above and below
COLUMNS = 260  # of more stretches than these, as many columns are drawn, each as high as the highest in it
SKY = "#56B4E9"  # of Okabe and Ito


def area_picture(heights: Sequence[int], ends: Sequence[float], *, line: int | None, words: str, end: str) -> str:
    """Heights along an axis as an area: an inline SVG.

    Args:
        heights: of each stretch, at least one.
        ends: of each stretch, ascending, as shares of the whole length.
        line: a height that is drawn as a line; None: none.
        words: what stands above the picture.
        end: what stands at the right end of the length, which begins with 0.

    >>> area_picture([4, 8], [0.5, 1.0], line=10, words="a < b", end="2 s")[:52]
    '<svg role="img" aria-label="a &lt; b" viewBox="0 0 5'
    """
    top = max(*heights, line or 0, 1)

    def down(height: int) -> str:
        return f"{ROOM + TALL * (1 - height / top):.1f}"

    stretches = [*zip(heights, ends, strict=True)]
    # Draw no more columns than can be told apart.
    if len(stretches) > COLUMNS:
        highest, begin = [0] * COLUMNS, 0.0
        for height, until in stretches:
            for column in range(int(begin * COLUMNS), min(COLUMNS - 1, int(until * COLUMNS)) + 1):
                highest[column] = max(highest[column], height)
            begin = until
        stretches = [(height, (column + 1) / COLUMNS) for column, height in enumerate(highest)]
    floor, below = ROOM + TALL, ROOM + TALL + 14
    steps = "".join(f"V{down(height)}H{WIDE * until:.1f}" for height, until in stretches)
    level = "" if line is None else f'<path d="M0 {down(line)}H{WIDE}" stroke="currentColor" stroke-dasharray="6 3"/>'
    return (
        f'<svg role="img" aria-label="{html.escape(words)}" viewBox="0 0 {WIDE} {below + 4}" fill="currentColor"'
        f' style="width:100%;max-width:{WIDE}px;font:12px sans-serif">'
        f'<path d="M0 {floor}{steps}V{floor}Z" fill="{SKY}"/>{level}<path d="M0 {floor}H{WIDE}" stroke="currentColor"/>'
        f'<text x="0" y="12">{html.escape(words)}</text><text x="0" y="{below}">0</text>'
        f'<text x="{WIDE}" y="{below}" text-anchor="end">{html.escape(end)}</text></svg>'
    )


def record(row: Any) -> dict[str, Any]:
    """The fields of a row by name, except fields hidden from its `repr`, such as a solution."""
    return {field.name: getattr(row, field.name) for field in fields(row) if field.repr}


class Printed:
    """An answer that prints as title, facts and tables, in a notebook as HTML; its `records` make a data frame."""

    listed: ClassVar[str] = "rows"  # the field that holds the rows of `records`
    facts_width: ClassVar[int] = 11  # of the names of facts, at least

    def records(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        return [record(row) for row in getattr(self, self.listed)]

    def to_pandas(self) -> pandas.DataFrame:
        """The `records` as a ``pandas.DataFrame``.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas. Without it there is records().") from error
        return pandas.DataFrame(self.records())

    def _title(self) -> str:
        return ""

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield from ()

    def _tables(self) -> Iterable[Table]:
        return ()

    def __repr__(self) -> str:
        facts = list(self._facts())
        width = max([self.facts_width, *(len(name) + 2 for name, _ in facts)])
        lines = [line for line in (self._title(), *(f"  {name:<{width}}{text}" for name, text in facts)) if line]
        blocks = ["\n".join(lines)] if lines else []
        return "\n\n".join(blocks + [str(table) for table in self._tables()])

    def _repr_html_(self) -> str:
        return facts_html(self._title(), list(self._facts())) + "".join(table.html() for table in self._tables())


Row = TypeVar("Row")


class Listed(Printed, Generic[Row]):
    """An answer that is a sequence of its rows."""

    def __iter__(self) -> Iterator[Row]:
        return iter(getattr(self, self.listed))

    def __len__(self) -> int:
        return len(getattr(self, self.listed))

    def __getitem__(self, i: int) -> Row:
        return getattr(self, self.listed)[i]
