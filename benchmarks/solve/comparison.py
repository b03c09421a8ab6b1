"""Solvers on the graphs of `benchmarks/problems` and on unit chains: one row for each graph, budget and method.

    python -m benchmarks.solve [--graphs NAME ...] [--budgets 0.8 ...] [--methods NAME ...] [--time-limit 60] [--quick]
    python -m benchmarks.solve --least     # the smallest budget of each graph, from both sides
    python -m benchmarks.solve --report    # from the rows: results/solve.md and results/solve.png

Budgets are shares of the peak of keeping everything; those that no schedule meets are left out. Each solve is a process
of its own, on one thread and without PyTorch, so that its memory can be told: the peak of the resident set, and what it
was with the problem loaded and nothing solved.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import checkmate
from benchmarks.common.rows import Row, append, documented, origin
from benchmarks.networks.dags import unit_chain
from benchmarks.solve.report import render
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.solve import solve
from checkmate.units import parse_bytes

HERE = Path(__file__).parents[1]
PROBLEMS = HERE / "problems"
RESULTS = HERE / "results" / "solve.jsonl"
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3)
CHAINS = {"chain-8": 8, "chain-16": 16}  # layers, of unit cost and one byte each
BUDGETS_OF = {
    "vgg16": (0.9, 0.8, 0.7, 0.6),
    "chain-8": tuple(budget / 10 for budget in (8, 6, 5, 4, 3)),  # of 10 bytes for keeping everything
    "chain-16": tuple(budget / 18 for budget in (12, 10, 8, 6, 5, 4)),
}
MOST_OPS = {"milp": 200, "lp-rounding": 200}  # on larger graphs these build models of many GB, and answer nothing
LEAST, LEAST_SECONDS = "min_budget", 10.0
FILES = tuple(sorted(path.name.removesuffix(".json.gz") for path in PROBLEMS.glob("*.json.gz")))
GRAPHS = (*CHAINS, *FILES)
QUICK = {"graphs": ("resnet18", "unet"), "budgets": (0.6,), "methods": ("next-use", "auto"), "time_limit": 5.0}


def load(graph: str) -> Problem:
    """The problem of a graph."""
    return unit_chain(CHAINS[graph]) if graph in CHAINS else Problem.from_json(PROBLEMS / f"{graph}.json.gz")


def cases(
    graphs: Sequence[str], budgets: Sequence[float] | None, methods: Sequence[str]
) -> Iterator[tuple[str, float, str]]:
    """What is to be solved: graph, share and method, without the budgets and methods that cannot work."""
    for graph in graphs:
        problem = load(graph)
        for share in BUDGETS_OF.get(graph, BUDGETS) if budgets is None else budgets:
            if _budget(problem, share) < int(problem.unavoidable_bytes.max()):
                continue
            for method in methods:
                if len(problem.graph.ops) <= MOST_OPS.get(method, sys.maxsize):
                    yield graph, share, method


def _budget(problem: Problem, share: float) -> int:
    return int(share * problem.keep_all_peak)


def solve_here(graph: str, share: float | None, method: str, time_limit: float) -> Row:
    """Solve in this process, and say what came of it and what memory it took."""
    problem = load(graph)
    loaded = _peak_rss()
    if share is None:
        return {**least(problem, time_limit), "loaded_rss": loaded, "peak_rss": _peak_rss()}
    budget = _budget(problem, share)
    solution = solve(problem, budget, method=method, time_limit=time_limit)
    return {**facts(solution), "loaded_rss": loaded, "peak_rss": _peak_rss()}


def least(problem: Problem, time_limit: float) -> Row:
    """The smallest budget: a known plan's peak, and a proven bound."""
    began = time.perf_counter()
    ends = checkmate.min_budget(problem, time_limit=time_limit)
    return {
        "ops": len(problem.graph.ops),
        "keep_all_peak": problem.keep_all_peak,
        "peak": ends.peak,
        "peak_bound": ends.bound,
        "gap": ends.gap,
        "seconds": time.perf_counter() - began,
        "status": "proven" if ends.proven else "two ends",
    }


def facts(solution: Solution) -> Row:
    """The figures of a solution; costs and bounds are relative to running each op once.

    A method that tells its progress does so as ``details["trajectory"]``: seconds, cost and bound, each time that one
    of them became better. None stands for what there is not.
    """
    problem = solution.problem
    base = problem.keep_all_cost
    trajectory = [
        [seconds, _finite(cost / base), _finite(bound / base)]
        for seconds, cost, bound in solution.details.get("trajectory", [])
    ]
    return {
        "ops": len(problem.graph.ops),
        "budget": solution.budget,
        "keep_all_peak": problem.keep_all_peak,
        "keep_all_seconds": base,
        "profile": problem.profile.source,
        "status": solution.status.label,
        "cost_ratio": _finite(solution.cost / base),
        "bound_ratio": _finite(solution.bound / base),
        "gap": _finite(solution.gap),
        "peak": solution.peak,
        "seconds": solution.seconds,
        "first_plan_seconds": next((seconds for seconds, cost, _ in trajectory if cost is not None), None),
        "trajectory": trajectory,
        "message": solution.message,
    }


def _finite(x: float) -> float | None:
    return float(x) if abs(x) < float("inf") else None


def _peak_rss() -> int:
    """Bytes: the most that this process has had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def solve_apart(graph: str, share: float | None, method: str, time_limit: float, memory_limit: int) -> Row:
    """Solve in a process of its own; a process that fails or does not end makes a row that says so."""
    wanted = {"graph": graph, "share": share, "method": method, "time_limit": time_limit}
    command = [sys.executable, "-m", "benchmarks.solve", "--one", json.dumps(wanted)]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    try:
        run = subprocess.run(
            [*command, "--memory-limit", str(memory_limit)],
            capture_output=True,
            text=True,
            check=False,
            cwd=HERE.parent,
            env={**os.environ, **one_thread},
            timeout=60 + 5 * time_limit,
        )
    except subprocess.TimeoutExpired as late:
        return {**wanted, "status": "did not end", "seconds": late.timeout}
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or [f"ended with {run.returncode}"])[-1]
        return {**wanted, "status": "failed", "message": reason}
    return {**wanted, **json.loads(run.stdout)}


def main() -> None:
    """Solve what was asked for and append the rows to the file, or make the report of the rows."""
    parser = documented(__doc__)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=GRAPHS, metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=float, help="shares of the peak of keeping everything")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each solve")
    parser.add_argument("--memory-limit", default="16 GB", help="of address space for each solve")
    parser.add_argument("--quick", action="store_true", help="two graphs, one budget, two methods, few seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--least", action="store_true", help="the smallest budgets, in 10 seconds each")
    parser.add_argument("--report", action="store_true", help="write the table and the picture of the rows")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    memory_limit = parse_bytes(args.memory_limit)
    if args.one:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
        print(json.dumps(solve_here(**json.loads(args.one))))
        return
    if args.report:
        render(args.out)
        return
    if args.quick:
        vars(args).update(QUICK)
    source = origin("numpy", "scipy", "highspy")
    wanted: Iterable[tuple[str, float | None, str]] = cases(args.graphs, args.budgets, args.methods)
    if args.least:
        wanted, args.time_limit = [(graph, None, LEAST) for graph in args.graphs], LEAST_SECONDS
    for graph, share, method in wanted:
        row = {**source, **solve_apart(graph, share, method, args.time_limit, memory_limit)}
        append(args.out, row)
        print(graph, share, method, row["status"], row.get("cost_ratio"), row.get("gap"), row.get("seconds"))
