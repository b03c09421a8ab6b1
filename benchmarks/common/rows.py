"""The rows that benchmarks write, one JSON object a line: where they come from, how they are kept and shown."""

from __future__ import annotations

import argparse
import json
import platform
import string
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkmate.core.solution import Solution
from checkmate.units import format_bytes, format_seconds

Row = dict[str, Any]
Column = str | Callable[[Row], str]


def origin(*packages: str) -> dict[str, str]:
    """The place and time at which a row was made, with the versions of packages; by default of PyTorch."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=root)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")  # these are made of rows
    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": f"{commit}-dirty" if changed else commit,
        **{package: version(package) for package in packages or ("torch",)},
        "python": platform.python_version(),
        "cpu": cpu[0] if cpu else platform.processor(),
    }


def append(path: Path, *rows: Row) -> None:
    """Add rows to a file, whose folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The last of the rows that have the same values under some keys."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def plan_facts(solution: Solution) -> Row:
    """Figures of a plan."""
    return {
        "method": solution.method,
        "status": solution.status.label,
        "overhead": solution.overhead,
        "gap": solution.gap,
        "plan_seconds": solution.seconds,
    }


class _Cell(string.Formatter):
    """Figures by their units; one that there is not is a `LookupError`."""

    units: Mapping[str, Callable[[Any], str]] = {
        "bytes": format_bytes,
        "MB": lambda count: f"{count / 1e6:.1f} MB",
        "seconds": format_seconds,
        "beyond": lambda ratio: f"{ratio - 1:+.2%}".replace("-0.00%", "+0.00%"),  # what comes on top of 1
    }

    def format_field(self, value: Any, form: str) -> str:
        if value is None:
            raise LookupError
        return self.units[form](value) if form in self.units else format(value, form)


def cell(row: Row, column: Column) -> str:
    """The text of a column for a row, by a function or a format; after a bar is what stands for figures that are not.

    >>> cell({"peak": 2_000_000, "gap": None}, "{peak:bytes}, {gap:.2%}|{peak:bytes}|none")
    '2.00 MB'
    """
    if not isinstance(column, str):
        return column(row)
    for form in column.split("|"):
        try:
            return _Cell().vformat(form, (), row)
        except (LookupError, TypeError):  # of a part of what is None, too
            continue
    return ""


def documented(about: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a script."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_names(parser: argparse.ArgumentParser, known: Collection[str], default: Sequence[str] = ()) -> None:
    """The argument ``NETWORK ...`` of a script: ``names``, of those that are known; by default some, or all."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"there is no {text!r}; there are {', '.join(known)}")
        return text

    told = f"of {', '.join(known)}; by default {', '.join(default) or 'all'}"
    parser.add_argument("names", nargs="*", type=name, metavar="NETWORK", help=told, default=[*(default or known)])
