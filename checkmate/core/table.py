"""What answers print as, in a terminal, in a notebook and as a data frame: a title, facts and tables."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]


@dataclass(frozen=True)
class Table:
    """Rows of text under heads, columns as wide as needed; those of ``numbers`` stand to the right.

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
        r"""The same in Markdown, less the title; what would end a cell or begin a tag is escaped.

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
        """The same in HTML, the text escaped."""
        title = Table((self.title,)).html() if self.title else ""
        head = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Notes(Table):
    """A table of two columns whose texts are long: below each other, as text."""

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {first}\n    {second}" for first, second in self.rows)])


Row = TypeVar("Row")
Cells = tuple[str, ...]


def first_rows(
    rows: Sequence[Row], top: int, cells: Callable[[Row], Cells], rest: Callable[[Sequence[Row]], Cells]
) -> list[Cells]:
    """The cells of the first rows, and a row that says how many are left, with what ``rest`` says of these."""
    left = rows[top:]
    return [*map(cells, rows[:top]), *([(f"... and {len(left)} more", *rest(left))] if left else [])]


class Printed(ABC):
    """An answer that prints as a title, facts and tables, in a notebook as HTML; its `records` make a data frame."""

    facts_width: ClassVar[int] = 11  # of the names of facts, at least

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Each row as a dict."""

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
        title, facts = self._title(), list(self._facts())
        above = [Table((title, ""), facts) if facts else Table((title,))] if title else []
        return "".join(table.html() for table in (*above, *self._tables()))
