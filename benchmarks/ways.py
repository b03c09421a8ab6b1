"""Worth of ops that may write over what dies at them: smallest budgets before and after, on the eleven graphs.

    python -m benchmarks.ways [NETWORK ...] [--time-limit SECONDS]
    python -m benchmarks.ways --report      # from the rows: results/ways.md

Two forms of each step: "file" is the problem of `benchmarks/problems`, ops as PyTorch has them, each gradient of a
convolution with the other, in PyTorch's order; "ways" is the step traced here, with convolutions in two, large results
late, and ops that may write over what dies at them. One row for each form: the peak of keeping everything, and the
smallest budget, plan and proof, with the loss at once and in parts. Each network is a process of its own, on one
thread; limits are of seconds that the process computes. Older rows have costs of plans, and a third form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.solve.comparison import FILES, load
from checkmate.core.answer import Table
from checkmate.core.problem import Problem
from checkmate.solvers.search.min_budget import min_budget
from checkmate.units import format_bytes

FORMS = ("file", "ways")
HEADER = ("graph", "ways", "keep all", "after", "smallest", "after", "lower by", "in parts")


def rows_of(name: str, time_limit: float) -> Iterator[Row]:
    """Both forms of a step, in seconds that this process computes."""
    from benchmarks.graphs import problem_of  # with PyTorch

    forms = dict(zip(FORMS, (load(name), problem_of(name)), strict=True))
    count_own_seconds()
    for form, problem in forms.items():
        yield {"network": name, "form": form, **row_of(problem, time_limit)}


def row_of(problem: Problem, time_limit: float) -> Row:
    """The smallest budget of one form."""
    in_parts = min_budget(problem, time_limit=time_limit)
    ends = min_budget(replace(problem, next_split=None), time_limit=time_limit)
    row: Row = {"ops": len(problem.graph.ops), "ways": len(problem.profile.ways), "time_limit": time_limit}
    row |= {"keep_all_peak": problem.keep_all_peak, "smallest": ends.peak, "smallest_bound": ends.bound}
    return row | {"smallest_in_parts": in_parts.peak}


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    limits = ", ".join(sorted({f"{row['time_limit']:g} s" for row in rows}))
    last = {(row["network"], row["form"]): row for row in latest(rows, "network", "form")}
    names = dict.fromkeys(name for name, _ in sorted(last, key=lambda of: (last[of]["ops"], of[0])))
    lines = [_line(name, last[name, "file"], last[name, "ways"]) for name in names]
    return document(
        "Ways to run an op",
        f"Made by `python -m benchmarks.ways` at {where_from(rows)}, one thread, {limits} for each smallest budget. "
        "Before: ops as PyTorch has them. After: convolutions' gradients apart, large results late, ops that write "
        "over what dies at them. In parts: the smallest budget with the loss in parts, too.",
        Table(HEADER, lines, HEADER[1:]),
    )


def _line(name: str, before: Row, after: Row) -> list[str]:
    pairs = ((row[key] for row in (before, after)) for key in ("keep_all_peak", "smallest"))
    sizes = [format_bytes(size) for pair in pairs for size in pair]
    lower, in_parts = 1 - after["smallest"] / before["smallest"], after["smallest_in_parts"]
    parts = format_bytes(in_parts) if in_parts < after["smallest"] else ""
    return [name, str(after["ways"]), *sizes, f"{lower:.1%}", parts]


BENCHMARK = Benchmark(
    __doc__,
    "ways.jsonl",
    rows_of,
    {"network": "{network}", "form": "{form}", "ways": "{ways}", "smallest": "{smallest:bytes}"},
    names=FILES,
    options={"time_limit": (20.0, "seconds for each smallest budget")},
    packages=("torch", "numpy", "highspy"),
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
