"""The rows of `benchmarks.solve` as a table in Markdown and a picture of gap against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.rows import Column, Row, latest, read
from benchmarks.common.runner import document, table_of, where_from
from checkmate.core.answer import Table

MARKERS = "ovs^D<P>X*dph"
LEAST_GAP = 1e-6  # what is drawn for less: a logarithm has no zero
COLUMNS: dict[str, Column] = {
    "graph": "{graph}",
    "ops": "{ops:d}|–",
    "budget": "{share:.2f}",
    "method": "{method}",
    "cost": "{cost_ratio:.4f}|–",
    "bound": "{bound_ratio:.4f}|–",
    "gap": "{gap:.2%}|–",
    "to best": "{to_best:.2%}|–",
    "first plan": "{first_plan_seconds:.1f} s|–",
    "seconds": "{seconds:.1f} s|–",
    "memory": "{memory:.0f} MB|–",
    "status": "{status}",
}
LEAST: dict[str, Column] = {
    "graph": "{graph}",
    "ops": "{ops}",
    "reached": lambda row: f"{row['peak'] / row['keep_all_peak']:.4f}",
    "bound": lambda row: f"{row['peak_bound'] / row['keep_all_peak']:.4f}",
    "gap": "{gap:.2%}",
    "seconds": "{seconds:.1f} s",
}


def page(every: Sequence[Row]) -> str:
    """All solves, and the smallest budgets where they were looked for."""
    rows = in_order(every)
    profiles = sorted({row["profile"] for row in rows if "profile" in row})
    best = best_bounds(rows)
    parts: list[str | Table] = [
        f"Made by `python -m benchmarks.solve` at {where_from(rows)}, one thread; costs of "
        f"ops: {', '.join(profiles)}. Budgets are shares of the peak of keeping everything; cost and bound are "
        "relative to running each op once. The gap is to the method's own bound, then to the best bound of any method "
        "here; memory is what the process takes beyond the loaded problem.",
        table_of(COLUMNS, [{**row, **_compared(row, best)} for row in rows]),
    ]
    least = [row for row in every if row["share"] is None and "peak" in row]
    if last := sorted(latest(least, "graph"), key=lambda row: row["ops"]):
        parts += [
            "## The smallest budget",
            "As shares of the peak of keeping everything: a plan is known that reaches the first, and no schedule at "
            "all reaches less than the second.",
            table_of(LEAST, last),
        ]
    return document("Solvers on training steps", *parts)


def draw_beside(rows_file: Path) -> None:
    """Draw the picture next to a file of rows, with its name."""
    draw(in_order(read(rows_file)), rows_file.with_suffix(".png"))


def in_order(every: Sequence[Row]) -> list[Row]:
    """The last solve of each graph, budget, method and time limit; small graphs and large budgets first."""
    solves = [row for row in every if row["share"] is not None]
    ops = {row["graph"]: row["ops"] for row in solves if "ops" in row}
    return sorted(
        latest(solves, "graph", "share", "method", "time_limit"),
        key=lambda row: (ops.get(row["graph"], 0), row["graph"], -row["share"], row["method"], row["time_limit"]),
    )


Instance = tuple[Any, ...]


def _instance(row: Row) -> Instance:
    """Values that two rows must share for the bound of one to hold for the other."""
    return tuple(row.get(key) for key in ("graph", "budget", "keep_all_peak", "keep_all_seconds"))


def best_bounds(rows: Sequence[Row]) -> dict[Instance, float]:
    """For each problem and budget, the best bound of any method, relative to running each op once."""
    best: dict[Instance, float] = {}
    for row in rows:
        if row.get("bound_ratio") is not None:
            best[_instance(row)] = max(best.get(_instance(row), 1.0), row["bound_ratio"])
    return best


def _compared(row: Row, best: dict[Instance, float]) -> Row:
    """The gap to the best bound, and the MB beyond the loaded problem."""
    cost = row.get("cost_ratio")
    memory = (row["peak_rss"] - row["loaded_rss"]) / 1e6 if "peak_rss" in row else None
    return {"to_best": None if cost is None else _gap(cost, best[_instance(row)]), "memory": memory}


def _gap(cost: float, bound: float) -> float:
    return max(0.0, (cost - bound) / cost)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Gap to the best bound of any method against time, a marker and a colour for each method.

    A marker where a solve ended, and a line to it where the method tells its progress.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    best = best_bounds(rows)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="seconds", ylabel="gap to the best proven bound")
    planned = [row for row in rows if row.get("cost_ratio") is not None]
    for i, method in enumerate(sorted({row["method"] for row in planned})):
        color, ends = colormaps["tab20"](i % 20), []
        for row in (row for row in planned if row["method"] == method):
            bound = best[_instance(row)]
            found = [(seconds, cost) for seconds, cost, _ in row["trajectory"] if cost is not None]
            points = [(s, max(LEAST_GAP, _gap(c, bound))) for s, c in [*found, (row["seconds"], row["cost_ratio"])]]
            axes.step(*zip(*points, strict=True), where="post", color=color, alpha=0.4, linewidth=0.8)
            ends.append(points[-1])
        axes.plot(*zip(*ends, strict=True), MARKERS[i % len(MARKERS)], markersize=5, color=color, label=method)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    axes.grid(alpha=0.3)
    axes.set_title("One marker for each graph and budget")
    figure.savefig(path, dpi=110, metadata={"Software": None})
