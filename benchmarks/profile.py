"""How true predicted step times are: plans at several budgets, predicted and measured, one row for each.

    python -m benchmarks.profile [NETWORK ...] [--shares 0.1 0.5 1] [--rounds 12] [--out FILE]

Everything runs on one thread. A network is profiled anew before its steps are timed and once more after; the steps of
all its plans run in turn, so that what else the machine does meets all of them. Measured seconds are medians of the
processor time of the process (``measured_seconds``), which other programs change little, and of the clock
(``wall_seconds``), which they do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import checkmate
from benchmarks import measuring
from benchmarks.step import origin
from checkmate.plan import cost
from tests.models import CASES, Case

RESULTS = Path(__file__).parent / "results" / "profile.jsonl"
HEADER = ("network", "share", "predicted", "again", "measured", "wall", "of measured", "of wall", "profiles differ")


def rows(case: Case, shares: list[float], rounds: int, time_limit: float) -> Iterator[dict[str, Any]]:
    """Plan one network at each share between the smallest budget and keeping everything, and time the plans."""
    _, plain, batch = case.make(0)
    began = time.perf_counter()
    problem = checkmate.trace(plain, *batch, cache=False)
    trace_seconds = time.perf_counter() - began
    lowest, keep_all = problem.min_budget().peak, problem.keep_all_peak
    budgets = [lowest + int(share * (keep_all - lowest)) for share in shares]
    made = [case.make(0) for _ in shares]
    compiled = [
        checkmate.compile(step, budget=budget, time_limit=time_limit, profile=problem.profile)
        for (_, step, _), budget in zip(made, budgets, strict=True)
    ]
    times: list[list[tuple[float, float]]] = [[] for _ in shares]
    for _ in range(rounds + 2):
        for taken, step, (module, _, data) in zip(times, compiled, made, strict=True):
            module.zero_grad(set_to_none=True)
            clock, processor = time.perf_counter(), time.process_time()
            step(*data).backward()
            taken.append((time.process_time() - processor, time.perf_counter() - clock))
    again = checkmate.trace(plain, *batch, cache=False)
    for share, budget, step, taken in zip(shares, budgets, compiled, times, strict=True):
        plan = step.plans[0].plan
        assert plan is not None  # what compile returns has one
        processor, clock = (statistics.median(seconds) for seconds in zip(*taken[2:], strict=True))
        yield {
            "model": case.name,
            "ops": len(problem.graph.ops),
            "share": share,
            "budget": budget,
            "predicted_seconds": cost(plan, problem),
            "predicted_again_seconds": cost(plan, again),
            "measured_seconds": processor,
            "wall_seconds": clock,
            "rounds": rounds,
            "trace_seconds": trace_seconds,
        }


def summary(measured: list[dict[str, Any]]) -> str:
    """The medians over all rows, and of the rank correlations of each network's plans."""
    error = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in measured]
    between = [abs(row["predicted_again_seconds"] / row["predicted_seconds"] - 1) for row in measured]
    lines = [
        f"predicted is off measured by {statistics.median(error):.1%}, the two profiles differ by "
        f"{statistics.median(between):.1%} (medians of {len(measured)} plans)"
    ]
    ranks = []
    for name in dict.fromkeys(row["model"] for row in measured):
        pairs = [(row["predicted_seconds"], row["measured_seconds"]) for row in measured if row["model"] == name]
        if len(pairs) > 2:
            ranks.append(float(spearmanr(np.array(pairs)).statistic))
    if ranks:
        lines.append(f"rank correlation of a network's plans: {statistics.median(ranks):.2f} (median of {len(ranks)})")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    predicted, again, measured, wall = (
        row[f"{name}_seconds"] for name in ("predicted", "predicted_again", "measured", "wall")
    )
    milliseconds = [f"{seconds * 1e3:.2f} ms" for seconds in (predicted, again, measured, wall)]
    shares = [f"{predicted / measured:.3f}", f"{predicted / wall:.3f}", f"{again / predicted - 1:+.1%}"]
    return [row["model"], f"{row['share']:g}", *milliseconds, *shares]


def main() -> None:
    """Measure what was asked for, append the rows to the file, and print them as a table."""
    parser = argparse.ArgumentParser(description="Compare predicted with measured step times.")
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each plan")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds to plan for one budget")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.networks) - set(CASES):
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    about, measured = origin(), []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for name in args.networks or CASES:
            torch._dynamo.reset()
            for row in rows(CASES[name], args.shares, args.rounds, args.time_limit):
                out.write(json.dumps({**about, **row}) + "\n")
                out.flush()
                measured.append(row)
    print(measuring.table(HEADER, [_cells(row) for row in measured]) + "\n" + summary(measured))


if __name__ == "__main__":
    main()
