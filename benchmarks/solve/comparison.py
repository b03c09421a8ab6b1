"""Solvers on the graphs of `benchmarks/problems` and on unit chains: one row for each graph, budget and method.

    python -m benchmarks.solve [GRAPH ...] [--share 0.8 ...] [--method NAME ...] [--time-limit 60] [--quick]
    python -m benchmarks.solve --report    # from the rows: results/solve.md and results/solve.png

Budgets are shares of the peak of keeping everything; those that no schedule meets are left out. Each solve is a process
of its own, on one thread and without PyTorch, so that its memory can be told: the peak of the resident set, and what it
was with the problem loaded and nothing solved. The method "min_budget" with a share of 0 finds the smallest budget, in
ten seconds: a known plan's peak, and a proven bound.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkmate
from benchmarks.common.apart import EndedEarly
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.solve import report
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.solve import solve
from checkmate.units import parse_bytes

HERE = Path(__file__).parents[1]
PROBLEMS = HERE / "problems"
CHAINS = {"chain-8": 8, "chain-16": 16}  # layers, of unit cost and one byte each
FILES = tuple(sorted(path.name.removesuffix(".json.gz") for path in PROBLEMS.glob("*.json.gz")))
SMALLEST, LEAST, LEAST_SECONDS = 0.0, "min_budget", 10.0
SHARES = {
    "chain-8": tuple(budget / 10 for budget in (8, 6, 5, 4, 3, 0)),  # of 10 bytes for keeping everything
    "chain-16": tuple(budget / 18 for budget in (12, 10, 8, 6, 5, 4, 0)),
    **dict.fromkeys(FILES, (0.8, 0.6, 0.5, 0.4, 0.3, SMALLEST)),
    "vgg16": (0.9, 0.8, 0.7, 0.6, SMALLEST),
}
MOST_OPS = {"milp": 200, "lp-rounding": 200}  # on larger graphs these build models of many GB, and answer nothing
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
LATE = 60, 5  # seconds, and times the limit, that a process may compute


def load(graph: str) -> Problem:
    """The problem of a graph."""
    if graph not in CHAINS:
        return Problem.from_json(PROBLEMS / f"{graph}.json.gz")
    from benchmarks.networks.dags import unit_chain  # beside networks of PyTorch

    return unit_chain(CHAINS[graph])


def rows_of(name: str, share: float, method: str, time_limit: float, memory_limit: str) -> Iterator[Row]:
    """Solve in this process, and say what came of it and what memory it took; nothing where that cannot work."""
    problem = load(name)
    budget = int(share * problem.keep_all_peak)
    if share == SMALLEST and method == LEAST:
        about = {"graph": name, "share": None, "method": LEAST, "time_limit": LEAST_SECONDS}
        yield {**about, "loaded_rss": peak_rss(), **least(problem, LEAST_SECONDS), "peak_rss": peak_rss()}
    is_large = len(problem.graph.ops) > MOST_OPS.get(method, sys.maxsize)
    if method == LEAST or is_large or budget < problem.unavoidable_bytes.max():
        return
    most_bytes, most_seconds = parse_bytes(memory_limit), int(LATE[0] + LATE[1] * time_limit)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds + 5))
    loaded = peak_rss()
    solution = solve(problem, budget, method=method, time_limit=time_limit)
    row = {"graph": name, "share": share, "method": method, "time_limit": time_limit, **facts(solution)}
    yield {**row, "loaded_rss": loaded, "peak_rss": peak_rss()}


def least(problem: Problem, time_limit: float) -> Row:
    """The smallest budget: a known plan's peak, and a proven bound."""
    began = time.perf_counter()
    ends = checkmate.min_budget(problem, time_limit=time_limit)
    row: Row = {"ops": len(problem.graph.ops), "keep_all_peak": problem.keep_all_peak}
    row |= {"peak": ends.peak, "peak_bound": ends.bound, "gap": ends.gap}
    return row | {"seconds": time.perf_counter() - began, "status": "proven" if ends.proven else "two ends"}


def ended(case: dict[str, Any], end: EndedEarly) -> Row:
    """The row of a process that failed or did not end."""
    if case["method"] not in (*METHODS, LEAST):
        raise end
    about = {"graph": case["name"], **{key: case[key] for key in ("share", "method", "time_limit")}}
    return {**about, "status": "did not end" if end.late else "failed", "message": str(end)}


def figures(solution: Solution) -> Row:
    """The figures of a solution, without its trajectory."""
    return {name: value for name, value in facts(solution).items() if name != "trajectory"}


def facts(solution: Solution) -> Row:
    """The figures of a solution; costs and bounds are relative to running each op once.

    A method that tells its progress does so as ``details["trajectory"]``: seconds, cost and bound, each time that one
    of them became better; ``second_ratio`` is the cost of the best plan after a second. None stands for what there is
    not.
    """
    problem = solution.problem
    base = problem.keep_all_cost
    trajectory = [
        [seconds, _finite(cost / base), _finite(bound / base)]
        for seconds, cost, bound in solution.details.get("trajectory", [])
    ]
    row: Row = {"ops": len(problem.graph.ops), "budget": solution.budget, "keep_all_peak": problem.keep_all_peak}
    row |= {"keep_all_seconds": base, "profile": problem.profile.source, "status": solution.status.label}
    row |= {"cost_ratio": _finite(solution.cost / base), "bound_ratio": _finite(solution.bound / base)}
    row |= {"gap": _finite(solution.gap), "peak": solution.peak, "seconds": solution.seconds}
    row["second_ratio"] = next((cost for seconds, cost, _ in reversed(trajectory) if seconds <= 1.0), None)
    row["first_plan_seconds"] = next((seconds for seconds, cost, _ in trajectory if cost is not None), None)
    return row | {"trajectory": trajectory, "message": solution.message}


def _finite(x: float) -> float | None:
    return float(x) if abs(x) < float("inf") else None


def peak_rss() -> int:
    """Bytes: the most that this process has had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


BENCHMARK = Benchmark(
    __doc__,
    "solve.jsonl",
    rows_of,
    {
        "graph": "{graph}",
        "share": "{share:.4g}|–",
        "method": "{method}",
        "status": "{status}",
        "cost": "{cost_ratio:.4g}|–",
        "gap": "{gap:.4g}|–",
        "seconds": "{seconds:.4g}|–",
    },
    names=SHARES,
    options={
        "share": (SHARES, "of the peak of keeping everything; 0 for the smallest budget"),
        "method": ((*METHODS, LEAST), f"as solve takes it, or {LEAST} for the share of 0"),
        "time_limit": (60.0, "seconds for each solve"),
        "memory_limit": ("16 GB", "of address space for each solve"),
    },
    quick={"names": ["resnet18", "unet"], "share": [0.6], "method": ["next-use", "auto"], "time_limit": 5.0},
    packages=("numpy", "scipy", "highspy"),
    environment=ONE_THREAD,
    ended=ended,
    page=report.page,
    report=report.draw_beside,
)
