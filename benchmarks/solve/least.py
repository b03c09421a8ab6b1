"""The smallest budget of each graph of `benchmarks.solve`, from both sides: a known plan's peak, and a proven bound.

python -m benchmarks.solve.least [GRAPH ...] [--time-limit SECONDS]
"""

from __future__ import annotations

import time
from dataclasses import replace

import checkmate
from benchmarks.common.rows import Row
from benchmarks.solve import comparison
from checkmate.core.problem import Problem

LEAST_SECONDS = 10.0


def least(problem: Problem, time_limit: float) -> Row:
    """What a row says of the smallest budget of a problem."""
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


def rows_of(name: str, time_limit: float) -> list[Row]:
    """The row of a graph, beside those of `benchmarks.solve`."""
    problem, loaded = comparison.load(name), comparison.peak_rss()
    row = {"graph": name, "share": None, "method": "min_budget", "time_limit": time_limit}
    return [{**row, **least(problem, time_limit), "loaded_rss": loaded, "peak_rss": comparison.peak_rss()}]


BENCHMARK = replace(
    comparison.BENCHMARK,
    about=__doc__,
    measure=rows_of,
    options={"time_limit": (LEAST_SECONDS, "seconds for each graph")},
    quick={},
    ended=None,
)

if __name__ == "__main__":
    BENCHMARK.run()
