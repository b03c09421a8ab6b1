"""How true predicted step times are: plans at several budgets, predicted and measured, one row for each.

    python -m benchmarks.profile [NETWORK ...] [--shares 0.1 0.5 1] [--pairs 5] [--rounds 8]

Steps run on one thread. Predicted and measured seconds come in pairs: the network is profiled anew, then its steps are
timed, all plans in turn, so that what else the machine does, and how fast it is just then, meets all alike. The plans
are those of one profile, made before. Measured seconds are medians of the processor time of the process
(``measured_seconds``), which other programs change little, and of the clock (``wall_seconds``), which they do.
``plan_seconds`` is what the plan costs by the profile it was made with, ``other_plan_seconds`` what the plan made with
the last profile costs by the first: the choice of plan must not flip on noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import checkmate
from benchmarks.common.rows import Row, read
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import budget_at
from benchmarks.networks import CASES
from checkmate.core.simulator import cost

HEADER = ("network", "share", "predicted", "measured", "wall", "of measured", "of wall", "other plan")


def rows(name: str, shares: list[float], pairs: int, rounds: int, time_limit: float) -> Iterator[Row]:
    """Plan one network at each share between the smallest budget and keeping everything, and time the plans."""
    torch.set_num_threads(1)
    case = CASES[name]
    _, plain, batch = case.make(0)
    problem = checkmate.trace(plain, *batch, cache=False)
    lowest, keep_all = checkmate.min_budget(problem).peak, problem.keep_all_peak
    budgets = [budget_at(share, lowest, keep_all) for share in shares]
    made = [case.make(0) for _ in shares]
    compiled = [
        checkmate.compile(step, budget=budget, time_limit=time_limit, profile=problem.profile, wait="best")
        for (_, step, _), budget in zip(made, budgets, strict=True)
    ]
    profiled = []
    processor: list[list[float]] = [[] for _ in shares]
    clock: list[list[float]] = [[] for _ in shares]
    for _ in range(pairs):
        profiled.append(checkmate.trace(plain, *batch, cache=False))
        taken: list[list[tuple[float, float]]] = [[] for _ in shares]
        for _ in range(rounds + 2):
            for seconds, step, (module, _, data) in zip(taken, compiled, made, strict=True):
                seconds.append(_seconds(module, step, data))
        for i, seconds in enumerate(taken):
            for times, column in zip((processor, clock), zip(*seconds[2:], strict=True), strict=True):
                times[i].append(statistics.median(column))
    for i, (share, budget, step) in enumerate(zip(shares, budgets, compiled, strict=True)):
        plan = step.plans[0].plan
        assert plan is not None  # what compile returns has one
        other = checkmate.solve(profiled[-1], budget, time_limit=time_limit).plan
        assert other is not None  # the bytes of both profiles are the same, so that a plan fits
        yield {
            "model": case.name,
            "ops": len(problem.graph.ops),
            "share": share,
            "budget": budget,
            "predicted_seconds": [cost(plan, each) for each in profiled],
            "measured_seconds": processor[i],
            "wall_seconds": clock[i],
            "rounds": rounds,
            "plan_seconds": cost(plan, problem),
            "other_plan_seconds": cost(other, problem),
        }


def _seconds(module: torch.nn.Module, step: Any, data: tuple[Any, ...]) -> tuple[float, float]:
    """What one step takes, of the processor's time and of the clock's."""
    module.zero_grad(set_to_none=True)
    clock, processor = time.perf_counter(), time.process_time()
    step(*data).backward()
    return time.process_time() - processor, time.perf_counter() - clock


def summary(measured: list[Row]) -> str:
    """The medians over all rows, and of the rank correlations of each network's plans."""
    error = [abs(_ratio(row) - 1) for row in measured]
    spread = [max(row["predicted_seconds"]) / min(row["predicted_seconds"]) - 1 for row in measured]
    flips = [abs(row["other_plan_seconds"] / row["plan_seconds"] - 1) for row in measured]
    lines = [
        f"predicted is off measured by {statistics.median(error):.1%}, the profiles of one network differ by "
        f"{statistics.median(spread):.1%} (medians of {len(measured)} plans)",
        f"plans made with another profile cost {statistics.median(flips):.1%} more or less, at most {max(flips):.1%}",
    ]
    ranks = []
    for name in dict.fromkeys(row["model"] for row in measured):
        pairs = [
            (statistics.median(row["predicted_seconds"]), statistics.median(row["measured_seconds"]))
            for row in measured
            if row["model"] == name
        ]
        if len(pairs) > 2:
            ranks.append(float(spearmanr(np.array(pairs)).statistic))
    if ranks:
        lines.append(f"rank correlation of a network's plans: {statistics.median(ranks):.2f} (median of {len(ranks)})")
    return "\n".join(lines)


def report(file: Path) -> None:
    """Print the figures of the last commit's rows."""
    rows = read(file)
    print(summary([row for row in rows if row["commit"] == rows[-1]["commit"] and "predicted_seconds" in row]))


def _ratio(row: Row, measured: str = "measured_seconds") -> float:
    """Predicted over measured seconds: the median over the pairs."""
    return statistics.median(p / m for p, m in zip(row["predicted_seconds"], row[measured], strict=True))


def _cells(row: Row) -> list[str]:
    names = ("predicted_seconds", "measured_seconds", "wall_seconds")
    milliseconds = [f"{statistics.median(row[name]) * 1e3:.2f} ms" for name in names]
    ratios = [f"{_ratio(row):.3f}", f"{_ratio(row, 'wall_seconds'):.3f}"]
    return [
        row["model"],
        f"{row['share']:g}",
        *milliseconds,
        *ratios,
        f"{row['other_plan_seconds'] / row['plan_seconds'] - 1:+.1%}",
    ]


BENCHMARK = Benchmark(
    __doc__,
    "profile.jsonl",
    rows,
    HEADER,
    _cells,
    names=CASES,
    options={
        "shares": ([0.0, 0.05, 0.1, 0.25, 0.5, 1.0], "of the way from the smallest budget to keeping everything"),
        "pairs": (5, "profiles, each with its timed steps"),
        "rounds": (8, "timed steps of each plan in a pair"),
        "time_limit": (5.0, "seconds to plan for one budget"),
    },
    report=report,
)

if __name__ == "__main__":
    BENCHMARK.run()
