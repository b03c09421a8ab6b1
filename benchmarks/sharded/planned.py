"""A sharded step planned as one: Llama-3 8B on one of 64 GPUs, beside what trainers choose by switches.

    python -m benchmarks.sharded ["auto"] [POLICY ...] [--link NVLink] [--budget 24 32] [--time-limit SECONDS]
    python -m benchmarks.sharded --report     # from the rows: results/sharded.md and .png, docs/comparison.md

The step is of `benchmarks/sharded/graph.py`: forward, loss and backward; the policies are those of
`benchmarks/sharded/policies.py`. All are simulated alike. A peak counts everything that is there: the rank's shards of
the parameters, 0.5 GB, gathered parameters, activations, and gradients before and after they are scattered; it counts
no optimizer, and nothing overlaps. "auto" plans within budgets in GB; a policy has a row, and one of a plan of `auto`
within its peak. Two links: NVLink joins all ranks, or a network joins them. Each case is a process of its own, on one
thread; seconds, those of the limit too, are the ones that the process computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row, latest, read, renewed, shown
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.sharded import graph
from benchmarks.sharded.policies import POLICIES, runs_of
from benchmarks.solve.comparison import HERE, ONE_THREAD, figures
from checkmate.core.answer import Table
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.solve import solve
from checkmate.units import format_bytes

PAGE = HERE.parent / "docs" / "comparison.md"
AUTO = "auto"
GB = 10**9
BUDGETS = (24.0, 32.0, 40.0, 48.0, 80.0)  # GB
HEADER = ("link", "method", "budget", "peak", "step", "bound", "gap", "runs again", "gathered again", "seconds")
BY_POLICY, BY_BUDGET = "what trainers choose", "within"  # the first heads of the tables on the page


def rows_of(name: str, link: str, budget: float, time_limit: float) -> Iterator[Row]:
    """A plan within a budget; or a policy, and a plan within its peak."""
    problem = graph.read(reach=graph.link(link))
    if name == AUTO:
        yield _planned(problem, link, int(budget * GB), time_limit)
        return
    policy = _policy(problem, link, name)
    yield policy
    yield {**_planned(problem, link, policy["peak"], time_limit), "beside": name}


def _planned(problem: Problem, link: str, budget: int, time_limit: float) -> Row:
    count_own_seconds()
    solution = solve(problem, budget, time_limit=time_limit, progress=False)
    row: Row = {"link": link, "method": AUTO, "time_limit": time_limit, **figures(solution)}
    return row if solution.schedule is None else {**row, **_again(problem, solution.schedule.recomputed)}


def _policy(problem: Problem, link: str, name: str) -> Row:
    """A policy as any plan, certified within the peak of keeping everything."""
    found = certify(problem, problem.keep_all_peak, runs_of(problem, name), method=name)
    assert found.schedule is not None
    row = {key: what for key, what in figures(found).items() if key not in ("bound_ratio", "gap", "status", "budget")}
    return {"link": link, "method": name, **row, **_again(problem, found.schedule.recomputed)}


def _again(problem: Problem, recomputed: np.ndarray) -> Row:
    """How many ops run again, and how many of them are all-gathers."""
    gathers = [k for k, op in enumerate(problem.graph.ops) if graph.ALL_GATHER in op.target]
    return {"runs_again": int(recomputed.sum()), "gathered_again": int(recomputed[gathers].sum())}


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The last row of each link, policy and plan: policies as they are listed, each before its plan, then budgets."""
    asked = [*POLICIES, None]
    found = latest([{"beside": None, "budget": None, **row} for row in rows], "link", "method", "beside", "budget")

    def place(row: Row) -> tuple[int, int, int]:
        policy = row["beside"] if row["method"] == AUTO else row["method"]
        return [*graph.LINKS].index(row["link"]), asked.index(policy), row["budget"] or 0

    return sorted(found, key=place)


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    rows = in_order(rows)
    profiles = "; ".join(dict.fromkeys(f"{row['link']}: {row['profile']}" for row in rows))
    once = ", ".join(dict.fromkeys(f"{row['keep_all_seconds']:.3f} s ({row['link']})" for row in rows))
    peak, ops = rows[0]["keep_all_peak"], rows[0]["ops"]
    return document(
        "Llama-3 8B on 64 GPUs",
        f"Made by `python -m benchmarks.sharded` at {where_from(rows)}, one thread; seconds are those that the "
        f"process computed. Costs: {profiles}. The step has {ops} ops, takes {once} with each op once, and "
        f"{format_bytes(peak)} with everything kept. Peaks count all that is there but optimizers; step and bound are "
        "beyond each op once. A plan below a policy is within its peak.",
        Table(HEADER, [_cells(row) for row in rows], HEADER[2:]),
        "![Steps by their peak](sharded.png)",
    )


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of `docs/comparison.md`, by their first heads."""
    rows = in_order(rows)
    links = [*dict.fromkeys(row["link"] for row in rows)]
    policies = {(row["link"], row["method"]): row for row in rows if row["method"] != AUTO}
    beside = {(row["link"], row["beside"]): row for row in rows if row["beside"] is not None}
    heads = [cell for link in links for cell in (link, "**checkmate** within its peak", "gap of ours")]
    lines = []
    for policy in POLICIES:
        line = [policy, format_bytes(policies[links[0], policy]["peak"])]
        for link in links:
            line += [_step(policies[link, policy]), *_ours(beside[link, policy])]
        lines.append(line)
    found = {BY_POLICY: Table((BY_POLICY, "peak", *heads), lines, (BY_POLICY, "peak", *heads)[1:]).markdown()}
    return {**found, BY_BUDGET: within(BY_BUDGET, [row for row in rows if row["beside"] is None])}


def within(head: str, rows: Sequence[Row]) -> str:
    """A table of budgets, which begins with this head: for each link the fastest policy that fits, and ours."""
    links = [*dict.fromkeys(row["link"] for row in rows)]
    ours = {(row["link"], row["budget"]): row for row in rows if row["method"] == AUTO}
    heads = [head, *(cell for link in links for cell in (f"{link}, fastest choice", "**checkmate**", "gap of ours"))]
    lines = []
    for budget in dict.fromkeys(budget for _, budget in ours):
        line = [format_bytes(budget)]
        for link in links:
            fit = [row for row in rows if row["method"] != AUTO and row["link"] == link and row["peak"] <= budget]
            fastest = min(fit, key=lambda row: row["cost_ratio"], default=None)
            line += ["none fits" if fastest is None else _step(fastest), *_ours(ours[link, budget])]
        lines.append(line)
    return Table(heads, lines, heads).markdown()


def _step(row: Row) -> str:
    return row["status"] if row["cost_ratio"] is None else _beyond(row["cost_ratio"])


def _beyond(ratio: float) -> str:
    """What a step takes beyond each op once; what rounds to nothing has no sign of less."""
    return f"{ratio - 1:+.2%}".replace("-0.00%", "+0.00%")


def _ours(row: Row) -> tuple[str, str]:
    return _step(row), shown(row["gap"], ".2%")


def _cells(row: Row) -> list[str]:
    again = [str(row.get(key, "")) for key in ("runs_again", "gathered_again")]
    return cells_with(row, *again)


def cells_with(row: Row, *own: str) -> list[str]:
    """What a table shows of a plan or a policy, with a benchmark's own cells before the seconds."""
    bound, gap, budget = (row.get(key) for key in ("bound_ratio", "gap", "budget"))
    return [
        row["link"],
        row["method"],
        "" if budget is None else format_bytes(budget),
        "" if row["peak"] is None else format_bytes(row["peak"]),
        _step(row),
        "" if bound is None else _beyond(bound),
        "" if gap is None else f"{gap:.2%}",
        *own,
        shown(row["seconds"], ".1f", " s") if row["method"] == AUTO else "",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Steps by their peak: a line of plans, and a mark for each policy, for each link."""
    from matplotlib.figure import Figure

    rows = [row for row in in_order(rows) if row["peak"] is not None]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    marks = dict(zip(POLICIES, "osDosD", strict=True))
    every = figure.subplots(1, len(graph.LINKS), sharey=True)
    for axes, link in zip(every, graph.LINKS, strict=True):
        of = [row for row in rows if row["link"] == link]
        plans = sorted((row["peak"] / GB, row["cost_ratio"] - 1) for row in of if row["method"] == AUTO)
        axes.plot(*zip(*plans, strict=True), ".-", color="tab:blue", label="checkmate")
        for row in of:
            if row["method"] in POLICIES:
                twice = "twice" in row["method"]
                face = "white" if twice else "tab:orange"
                axes.plot(
                    row["peak"] / GB,
                    row["cost_ratio"] - 1,
                    marks[row["method"]],
                    color="tab:orange",
                    markerfacecolor=face,
                    label=row["method"],
                )
        axes.set(title=link, xlabel="peak, GB")
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    every[0].set_ylabel("longer than with each op once")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def report(file: Path) -> None:
    """Draw the picture beside the rows, and renew the tables of the comparison where the rows are committed ones."""
    draw(read(file), file.with_suffix(".png"))
    if file == BENCHMARK.path:
        PAGE.write_text(renewed(PAGE, tables(read(file))))


BENCHMARK = Benchmark(
    __doc__,
    "sharded.jsonl",
    rows_of,
    HEADER,
    _cells,
    names=(AUTO, *POLICIES),
    options={
        "link": ((*graph.LINKS,), "between the ranks"),
        "budget": ({AUTO: BUDGETS, **dict.fromkeys(POLICIES, (0.0,))}, "GB, of auto"),
        "time_limit": (120.0, "seconds for each solve"),
    },
    packages=("numpy", "scipy", "highspy"),
    environment=ONE_THREAD,
    page=markdown,
    report=report,
)
