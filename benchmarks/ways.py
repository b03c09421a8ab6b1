"""What ways to run ops are worth: smallest budgets, costs and planning, before and after, on the eleven graphs.

    python -m benchmarks.ways [NETWORK ...] [--time-limit SECONDS]
    python -m benchmarks.ways --report      # from the rows: results/ways.md

Three forms of each step: "file" is the problem of `benchmarks/problems`, ops as PyTorch has them, each gradient of a
convolution with the other, in PyTorch's order; "plain" is the step traced here, with convolutions in two and large
results late; "ways" is that with ops that may write over what dies at them, and its row has the smallest budget with
losses in parts, too. One row for each form: the peak of keeping everything, the smallest budget, plan and proof; and
two plans, within 1.1 times the smallest budget of the file and within 40 % of its keep-all peak, or 1.5 times the
smallest where that is more. Costs are relative to running each op of the form once. Each network is a process of its
own, on one thread; seconds are those that the process computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row, latest, shown
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.solve.comparison import FILES, load
from checkmate.core.answer import Table
from checkmate.core.problem import Problem
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import solve
from checkmate.units import format_bytes

CLOSE, ROOMY = 1.1, 0.4  # of the smallest budget, of the keep-all peak of the file
ROOM = 1.5  # of the smallest budget, where that is more
FORMS = ("file", "plain", "ways")
HEADER = ("graph", "ways", "keep all", "after", "smallest", "after", "lower by", "in parts", "1.1 x: cost", "after")
PRINTED = ("form", "ways", "smallest", "close_cost_ratio", "roomy_seconds")
PLANNING = ("graph", "budget", "cost", "after", "gap", "after", "seconds", "after")


def forms_of(name: str) -> dict[str, Problem]:
    """The step as each form has it."""
    from benchmarks.graphs import problem_of  # with PyTorch

    traced = problem_of(name)
    plain = replace(traced, profile=replace(traced.profile, ways=()), smaller=None)
    return dict(zip(FORMS, (load(name), plain, traced), strict=True))


def rows_of(name: str, time_limit: float) -> list[Row]:
    """Solve in this process, in seconds that it computes."""
    forms = forms_of(name)
    count_own_seconds()
    file = forms["file"]
    least = min_budget(file, time_limit=time_limit).peak
    budgets = {"close": int(CLOSE * least), "roomy": max(int(ROOMY * file.keep_all_peak), int(ROOM * least))}
    return [{"network": name, "form": form, **row_of(problem, budgets, time_limit)} for form, problem in forms.items()]


def row_of(problem: Problem, budgets: dict[str, int], time_limit: float) -> Row:
    """What there is to say of one form, and of its plan within each budget."""
    in_parts = min_budget(problem, time_limit=time_limit)
    problem = replace(problem, smaller=None)
    ends = min_budget(problem, time_limit=time_limit)
    row: Row = {
        "ops": len(problem.graph.ops),
        "ways": len(problem.profile.ways),
        "time_limit": time_limit,
        "keep_all_peak": problem.keep_all_peak,
        "smallest": ends.peak,
        "smallest_bound": ends.bound,
        "smallest_in_parts": in_parts.peak,
    }
    for at, budget in budgets.items():
        found = solve(problem, budget, time_limit=time_limit, progress=False)
        cost = None if found.plan is None else found.cost / problem.keep_all_cost
        over = 0 if found.plan is None else found.plan.runs_over
        row |= {f"{at}_budget": budget, f"{at}_cost_ratio": cost, f"{at}_gap": found.gap if found.plan else None}
        row |= {f"{at}_seconds": found.seconds, f"{at}_written_over": over, f"{at}_peak": found.peak}
    return row


def markdown(rows: Sequence[Row]) -> str:
    """Two tables with a line that says where the rows are from."""
    limits = ", ".join(sorted({f"{row['time_limit']:g} s" for row in rows}))
    graphs: dict[str, dict[str, Row]] = {}
    for row in sorted(latest(rows, "network", "form"), key=lambda row: (row["ops"], row["network"])):
        graphs.setdefault(row["network"], {})[row["form"]] = row
    whole = {name: forms for name, forms in graphs.items() if len(forms) == len(FORMS)}
    return document(
        "Ways to run an op",
        f"Made by `python -m benchmarks.ways` at {where_from(rows)}, one thread, {limits} for each plan; "
        "seconds are those that the process computed, as the machine was busy with other work. Before: ops as PyTorch "
        "has them. After: convolutions' gradients apart, large results late, ops that write over what dies at them. "
        "In parts: the smallest budget with the loss in parts, too.",
        Table(HEADER, [_floor(name, forms) for name, forms in whole.items()], HEADER[1:]),
        "Planning within 40 % of the keep-all peak, or 1.5 times the smallest budget where that is more, of the same "
        "step without and with ways:",
        Table(PLANNING, [_planning(name, forms) for name, forms in whole.items()], PLANNING[1:]),
    )


def _floor(name: str, forms: dict[str, Row]) -> list[str]:
    before, after = forms["file"], forms["ways"]
    return [
        name,
        str(after["ways"]),
        *(format_bytes(row["keep_all_peak"]) for row in (before, after)),
        *(format_bytes(row["smallest"]) for row in (before, after)),
        f"{1 - after['smallest'] / before['smallest']:.1%}",
        format_bytes(after["smallest_in_parts"]) if after["smallest_in_parts"] < after["smallest"] else "",
        *(_overhead(row["close_cost_ratio"]) for row in (before, after)),
    ]


def _planning(name: str, forms: dict[str, Row]) -> list[str]:
    pair = forms["plain"], forms["ways"]
    return [
        name,
        format_bytes(pair[0]["roomy_budget"]),
        *(_overhead(row["roomy_cost_ratio"]) for row in pair),
        *(shown(row["roomy_gap"], ".2%") for row in pair),
        *(shown(row["roomy_seconds"], ".1f", " s") for row in pair),
    ]


def _overhead(cost: float | None) -> str:
    return "–" if cost is None else f"{cost - 1:+.2%}"


def _cells(row: Row) -> list[str]:
    return [row["network"], *(str(row[key]) for key in PRINTED)]


BENCHMARK = Benchmark(
    __doc__,
    "ways.jsonl",
    rows_of,
    ("network", *PRINTED),
    _cells,
    names=FILES,
    options={"time_limit": (20.0, "seconds for each solve, and each smallest budget")},
    packages=("torch", "numpy", "highspy"),
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
