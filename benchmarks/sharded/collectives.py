"""Estimates of collectives held against tables of others: by a data sheet, by a fitted latency and rate, by a table.

    python -m benchmarks.sharded.collectives [SOURCE ...]    # "vidur" reads CHECKMATE_MEASURED_OPS/vidur
    python -m benchmarks.sharded.collectives --report        # from the rows: results/collectives.md

Vidur (microsoft/vidur, MIT) measured all-reduces of 2, 4 and 8 ranks of a node of H100s, of 2 KB to 64 MiB:
``vidur/h100_dgx_all_reduce.csv.gz`` in a folder of the user's, as for `benchmarks.estimates`. Tables of autoparallel
(meta-pytorch/autoparallel, BSD-3-Clause) are in `data`: what its simulator takes for a collective, themselves
estimates. Those of the group 1 of ``colls8_8`` are of a node, all others of a network; NVLink's data sheet is held
against the former only. Every second size makes the fit and the table; the others say what they are worth.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.estimates.ops import FOLDER
from benchmarks.sharded.graph import fitted, table
from checkmate.core.answer import Table
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.mesh import ALL_REDUCE, Link, Point, interpolated, link_of

VIDUR = "vidur"
TABLES = ("colls8_8", "colls64_1")
ON_A_NODE = ((VIDUR, ""), ("colls8_8", "1"))
SHEET, FIT, TABLE = "data sheet", "latency and rate", "table"
HEADER = ("source", "collective", "ranks", "by", "latency", "rate", "sizes", "median error", "9 of 10", "worst")


def rows_of(name: str) -> Iterator[Row]:
    """The rows of a source: of each collective, what each way of estimating is off by."""
    for group, ranks, collective, points in _vidur() if name == VIDUR else _of_table(name):
        kept, others = points[::2], points[1::2]
        link = fitted(collective, kept, ranks)
        about = {"source": name, "group": group, "collective": collective, "ranks": ranks}
        if (name, group) in ON_A_NODE:
            sheet = link_of(DEVICES["h100"])
            yield {**about, "by": SHEET, **_link(sheet), **_errors(_by(sheet, collective, ranks, others), others)}
        yield {**about, "by": FIT, **_link(link), **_errors(_by(link, collective, ranks, others), others)}
        by_table = [interpolated(kept, whole) for whole, _ in others]
        yield {**about, "by": TABLE, **_errors(by_table, others)}


def _by(link: Link, collective: str, ranks: int, points: Sequence[Point]) -> list[float]:
    return [link.seconds(collective, whole, ranks) for whole, _ in points]


def _link(link: Link) -> Row:
    return {"latency": float(f"{link.latency:.4g}"), "rate": float(f"{link.rate:.4g}")}


def _errors(estimates: Sequence[float], points: Sequence[Point]) -> Row:
    """Shares of what was measured."""
    errors = [abs(estimate / seconds - 1) for estimate, (_, seconds) in zip(estimates, points, strict=True)]
    of = {"median_error": median(errors), "nine_of_ten": float(np.quantile(errors, 0.9)), "worst": max(errors)}
    return {"sizes": len(errors), **{name: round(error, 6) for name, error in of.items()}}


def _vidur() -> Iterator[tuple[str, int, str, list[Point]]]:
    """All-reduces by ranks: group, ranks, collective, points."""
    with gzip.open(Path(os.environ[FOLDER], "vidur", "h100_dgx_all_reduce.csv.gz"), "rt") as file:
        rows = [*csv.DictReader(file)]
    for ranks in sorted({int(row["num_workers"]) for row in rows}):
        times: dict[float, list[float]] = {}
        for row in rows:
            if int(row["num_workers"]) == ranks:
                times.setdefault(float(row["size"]), []).append(float(row["time_stats.all_reduce.median"]) / 1e3)
        yield "", ranks, ALL_REDUCE, [(size, median(of)) for size, of in sorted(times.items())]


def _of_table(name: str) -> Iterator[tuple[str, int, str, Sequence[Point]]]:
    for (group, ranks), collectives in sorted(table(name).items()):
        for collective, points in sorted(collectives.items()):
            yield group, ranks, collective, points


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The last row of each source, group, collective and way, in the order of sources."""
    found = latest(rows, "source", "group", "collective", "ranks", "by")
    place = [VIDUR, *TABLES]
    return sorted(found, key=lambda row: (place.index(row["source"]), row["group"], row["ranks"], row["collective"]))


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    rows = in_order(rows)
    return document(
        "Estimates of collectives",
        f"Made by `python -m benchmarks.sharded.collectives` at {where_from(rows)}. Errors are shares of what the "
        "source has, over the sizes that made neither the fit nor the table: half of them are within the median, nine "
        "of ten within the next. Vidur measured on a node of H100s, in whole microseconds; the other tables are "
        "estimates of a simulator.",
        Table(HEADER, [_cells(row) for row in rows], (*HEADER[2:3], *HEADER[4:])),
    )


def _cells(row: Row) -> list[str]:
    source = f"{row['source']}, group {row['group']}" if row["group"] else row["source"]
    link = ("", "") if "rate" not in row else (f"{1e6 * row['latency']:.0f} µs", f"{row['rate'] / 1e9:.0f} GB/s")
    errors = (f"{row[key]:.1%}" for key in ("median_error", "nine_of_ten", "worst"))
    return [source, row["collective"], str(row["ranks"]), row["by"], *link, str(row["sizes"]), *errors]


BENCHMARK = Benchmark(
    __doc__,
    "collectives.jsonl",
    rows_of,
    HEADER,
    _cells,
    names=(VIDUR, *TABLES),
    default=TABLES,
    packages=("numpy", "torch"),
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
