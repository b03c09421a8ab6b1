"""Worth of a second memory: plans that recompute, that send, and that do both, with those of others beside them.

    python -m benchmarks.second_memory [NETWORK ...] [--share 0.4 0.3] [--method NAME ...] [--time-limit SECONDS]
    python -m benchmarks.second_memory --report     # from the rows: results/second_memory.md

A network is a graph of `benchmarks/problems`, whose costs are estimates for an H100; the second memory is that of the
host, over PCIe 5 at 55 GB/s each way. Budgets are shares of the peak of keeping everything; those below what one op
alone needs are left out. "recomputation" is `auto` without a second memory. One row for each network, budget and
method; each is a process of its own, on one thread, on Linux. Seconds, those of the limit too, are the ones that the
process computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row, cell, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.solve.comparison import FILES, figures, load
from checkmate.core.host import Host
from checkmate.core.timing import timing
from checkmate.solvers.solve import solve

BUDGETS = (0.4, 0.3)
PCIE_5 = Host(256 * 10**9, send=55e9, fetch=55e9)
ALONE = "recomputation"
METHODS = (ALONE, "auto", "offload-all", "capuchin", "poet")
STEP = "{cost_ratio:.3f}|{status}"


def rows_of(name: str, share: float, method: str, time_limit: float) -> Iterator[Row]:
    """Solve in this process, in seconds that it computes; no row where no plan can fit."""
    plain = load(name)
    budget = int(share * plain.keep_all_peak)
    with_host = plain.with_host(PCIE_5)
    if budget < with_host.unavoidable_bytes.max():
        return
    count_own_seconds()
    problem, by = (plain, "auto") if method == ALONE else (with_host, method)
    solution = solve(problem, budget, method=by, time_limit=time_limit, progress=False)
    row: Row = {"network": name, "share": share, "method": method, "time_limit": time_limit, **figures(solution)}
    if solution.plan is not None:
        when = timing(solution.plan, problem)
        row["sent"] = sum(int(problem.sizes[t.value]) for t in when.transfers if not t.back)
        row["fetched"] = sum(int(problem.sizes[t.value]) for t in when.transfers if t.back)
        row["waited"] = when.waited / problem.keep_all_cost
        row["runs_again"] = len(solution.plan.runs) - len(problem.graph.ops)
    yield row


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The last row of each network, budget and method; small networks and large budgets first."""
    found = latest(rows, "network", "share", "method")
    return sorted(found, key=lambda row: (row["ops"], row["network"], -row["share"], METHODS.index(row["method"])))


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    limits = ", ".join(f"{limit:g}" for limit in sorted({row["time_limit"] for row in rows}))
    return document(
        "A second memory",
        f"Made by `python -m benchmarks.second_memory` at {where_from(rows)}, one thread, within {limits} "
        "seconds that the process computed. Ops are estimated for an H100, whose host is reached at 55 GB/s each way. "
        "A step is relative to one that keeps everything; all are simulated alike, what is waited for included.",
        BENCHMARK.table(in_order(rows)),
    )


BENCHMARK = Benchmark(
    __doc__,
    "second_memory.jsonl",
    rows_of,
    {
        "network": "{network}",
        "ops": "{ops}",
        "budget": "{share:.0%}",
        "method": "{method}",
        "step": "{cost_ratio:beyond}|{status}",
        "bound": lambda row: "" if row["cost_ratio"] is None else cell(row, "{bound_ratio:beyond}"),
        "gap": "{gap:.2%}|–",
        "sent": "{sent:bytes}",
        "waited": "{waited:.2%}|–",
        "seconds": "{seconds:.1f} s",
    },
    names=FILES,
    options={
        "share": (BUDGETS, "of the peak of keeping everything"),
        "method": (METHODS, "as solve takes it"),
        "time_limit": (60.0, "seconds for each solve"),
    },
    packages=("numpy", "scipy", "highspy"),
    page=markdown,
)
