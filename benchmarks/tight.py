"""How good plans are close to the smallest budget: `auto` at a few times it, and how wide its gap is then.

    python -m benchmarks.tight [NETWORK ...] [--times 1.02 1.1 ...] [--time-limit SECONDS]
    python -m benchmarks.tight --report     # from the rows: results/tight.md and results/tight.png

A network is a graph of `benchmarks/problems`. The smallest budget is what a plan is known for after ten seconds. One
row for each network and budget; each network is a process of its own, on one thread, on Linux. Seconds, those of the
limit too, are the ones that the process computes, so that other work on the machine does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row, latest, read
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.solve.comparison import FILES, LEAST_SECONDS, figures, load
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import solve

LEAST_GAP = 1e-5  # what is drawn for less: a logarithm has no zero


def rows_of(name: str, times: Sequence[float], time_limit: float) -> Iterator[Row]:
    """Solve in this process, in seconds that it computes."""
    problem = load(name)
    count_own_seconds()
    ends = min_budget(problem, time_limit=LEAST_SECONDS)
    for factor in times:
        budget = min(int(factor * ends.peak), problem.keep_all_peak)
        solution = solve(problem, budget, time_limit=time_limit, progress=False)
        row: Row = {"network": name, "times": factor, "time_limit": time_limit}
        yield {**row, "smallest": ends.peak, "smallest_bound": ends.bound, **figures(solution)}


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The last row of each network, budget and time limit; small networks and small budgets first."""
    found = latest(rows, "network", "times", "time_limit")
    return sorted(found, key=lambda row: (row["ops"], row["network"], row["times"], row["time_limit"]))


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    return document(
        "Close to the smallest budget",
        f"Made by `python -m benchmarks.tight` at {where_from(rows)}, one thread; seconds are those that the "
        "process computed, as the machine was busy with other work. Budgets are times the smallest budget that a plan "
        "is known for; the limit is that of seconds.",
        BENCHMARK.table(in_order(rows)),
        "![Gap against distance from the smallest budget](tight.png)",
    )


def lines_of(rows: Sequence[Row]) -> Iterator[tuple[str, list[float], list[float]]]:
    """For each network, of its longest time limit: how far budgets are from the smallest, and the gaps."""
    longest = {(row["network"], row["times"]): row for row in in_order(rows)}  # of one budget the longest comes last
    for network in dict.fromkeys(name for name, _ in longest):
        of = [row for (name, _), row in longest.items() if name == network and row["gap"] is not None]
        yield network, [row["times"] - 1 for row in of], [max(LEAST_GAP, row["gap"]) for row in of]


def draw(file: Path) -> None:
    """Gap against distance from the smallest budget, a line for each network, in a picture beside the rows."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = read(file)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="budget above the smallest", ylabel="gap")
    for i, (network, distances, gaps) in enumerate(lines_of(rows)):
        axes.plot(distances, gaps, "os^Dv"[i % 5] + "-", color=colormaps["tab20"](i % 20), label=network, markersize=4)
    ticks = sorted({row["times"] - 1 for row in rows})
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(file.with_suffix(".png"), dpi=110, metadata={"Software": None})


BENCHMARK = Benchmark(
    __doc__,
    "tight.jsonl",
    rows_of,
    {
        "network": "{network}",
        "ops": "{ops}",
        "budget": "{times:.2f}",
        "limit": "{time_limit:g} s",
        "recomputed": "{cost_ratio:beyond}|{status}",
        "after a second": "{second_ratio:beyond}|–",  # older rows have none
        "gap": "{gap:.2%}|–",
        "first plan": "{first_plan_seconds:.1f} s|–",
        "seconds": "{seconds:.1f} s",
    },
    names=FILES,
    options={
        "times": ([1.02, 1.05, 1.1, 1.2, 1.5], "the smallest budget"),
        "time_limit": (60.0, "seconds for each solve"),
    },
    packages=("numpy", "scipy", "highspy"),
    page=markdown,
    report=draw,
)

if __name__ == "__main__":
    BENCHMARK.run()
