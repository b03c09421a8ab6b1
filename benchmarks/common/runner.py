"""Parts of every benchmark: cases, a measure that runs each in a process of its own, rows in a file, and a table."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.rows import Column, Row, add_names, append, cell, documented, origin, read
from checkmate.core.answer import Table

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as a list of cases and a measure; `run` makes a script of it.

    A case is what `measure` is called with: a ``name``, where there are names, and the options. An option whose default
    is a tuple has a case for each of its values; all of these are combined. One whose default is a dict has a tuple for
    each name. One whose default is a list is one case's. A case of which the file has rows made at this commit is not
    measured again.

    Args:
        about: the script's docstring.
        file: of the rows, in ``benchmarks/results``.
        measure: gives the rows of a case; a function of a module, since it is called in another process.
        columns: of the table that is printed: by its head what it shows of a row.
        names: what there is to measure.
        default: which of these where none is named; all if it is empty.
        options: defaults of the other keyword arguments of `measure`, each with what it is.
        quick: the options that ``--quick`` stands for, and ``names``.
        packages: whose versions a row has.
        environment: variables of the processes.
        ended: the row of a case whose process did not come to its end; without it the benchmark ends there.
        page: the text of a page that is written beside the rows, of all that are there.
        report: draws pictures of the rows in the file that it is given.
    """

    about: str | None
    file: str
    measure: Callable[..., Iterable[Row]]
    columns: Mapping[str, Column]
    names: Collection[str] = ()
    default: Sequence[str] = ()
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ("torch",)
    environment: Mapping[str, str] = field(default_factory=dict)
    ended: Callable[[dict[str, Any], EndedEarly], Row] | None = None
    page: Callable[[list[Row]], str] | None = None
    report: Callable[[Path], object] | None = None

    @property
    def path(self) -> Path:
        """The file of the rows that are committed."""
        return RESULTS / self.file

    def parser(self) -> argparse.ArgumentParser:
        """The script's arguments."""
        parser = documented(self.about)
        if self.names:
            add_names(parser, self.names, self.default)
        for name, (default, told) in self.options.items():
            kind: dict[str, Any] = {"type": type(default)}
            values = next(iter(default.values())) if isinstance(default, dict) else default
            if isinstance(values, (tuple, list)):
                kind = {"type": type(values[0]), "nargs": "+"}
            elif isinstance(default, bool):
                kind = {"action": "store_true"}
            parser.add_argument("--" + name.replace("_", "-"), default=default, help=told, **kind)
        if self.quick:
            parser.add_argument("--quick", action="store_true", help=f"smaller: {dict(self.quick)}")
        if self.page or self.report:
            parser.add_argument("--report", action="store_true", help="measure nothing, write the pages")
        parser.add_argument("--out", type=Path, default=self.path, help="the file of the rows")
        return parser

    def cases(self, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """The cases that are asked for, name by name, in the order of the options."""
        given = {name: getattr(args, name) for name in self.options}
        many = {name: given[name] for name, (default, _) in self.options.items() if isinstance(default, (tuple, dict))}
        for name in args.names if self.names else [None]:
            of_name = (values[name] if isinstance(values, dict) else values for values in many.values())
            for values in itertools.product(*of_name):
                case = {**given, **dict(zip(many, values, strict=True))}
                yield case if name is None else {"name": name, **case}

    def table(self, rows: Iterable[Row]) -> Table:
        """Rows as they are shown."""
        return table_of(self.columns, rows)

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Measure what was asked for, append rows as they are made, print them, and write the pages of all rows.

        Raises:
            SystemExit: if rows of code that is not committed would go to the file that is.
        """
        args = self.parser().parse_args(arguments)
        if self.quick and args.quick:
            named = self.names and args.names != [*(self.default or self.names)]
            kept = {"names": args.names} if named else {}
            vars(args).update({**self.quick, **kept})
        if not getattr(args, "report", False):
            print("", self.table(self._measured(args)), sep="\n")
        if self.page is not None:
            args.out.with_suffix(".md").write_text(self.page(read(args.out)))
        if self.report is not None:
            self.report(args.out)

    def _measured(self, args: argparse.Namespace) -> list[Row]:
        about, made = origin(*self.packages), []
        committed = not about["commit"].endswith("-dirty")
        if args.out == self.path and not committed:
            raise SystemExit(
                f"{args.out.name} is for what is committed: commit first, or give another file with --out."
            )
        done = [row.get("asked") for row in read(args.out) if committed and row["commit"] == about["commit"]]
        for case in self.cases(args):
            if case in done:
                continue
            try:
                rows = [*apart(partial(self.measure, **case), environment=self.environment)]
            except EndedEarly as end:
                if self.ended is None:
                    raise
                rows = [self.ended(case, end)]
            for row in rows:
                append(args.out, {**about, "asked": case, **row})
                print("  ".join(cell(row, column) for column in self.columns.values()), flush=True)
            made += rows
        return made


def table_of(columns: Mapping[str, Column], rows: Iterable[Row], words: Collection[str] = ()) -> Table:
    """Rows as columns show them; the first column, and those of words, have no numbers."""
    heads = [*columns]
    lines = [[cell(row, column) for column in columns.values()] for row in rows]
    return Table(heads, lines, [head for head in heads[1:] if head not in words])


def document(title: str, *parts: str | Table) -> str:
    """A page in Markdown: a title, and paragraphs and tables below it."""
    texts = [part if isinstance(part, str) else part.markdown() for part in parts]
    return "\n\n".join([f"# {title}", *texts]) + "\n"


def where_from(rows: Sequence[Row]) -> str:
    """The commits and machines of rows, for the first line of a page."""
    commits, machines = (", ".join(sorted({row[key] for row in rows})) for key in ("commit", "cpu"))
    return f"{commits} on {machines}"
