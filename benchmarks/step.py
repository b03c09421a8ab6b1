"""Compiled against plain steps, in pairs: one row for each network, number of threads and budget.

    python -m benchmarks.step [NETWORK ...] [--threads 1 2] [--quick] [--out benchmarks/results/step.jsonl]

Budgets lie between the smallest that works (share 0) and keeping everything (share 1); a share of 2 is a budget that
leaves nothing to do, where the step should take no longer than a plain one. Peaks are in bytes at equal footing:
parameters, buffers and batch included, gradients too, optimizer state not.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

import checkmate
from benchmarks.common import timing as measuring
from benchmarks.networks import CASES, Case
from checkmate.backends.state import differing
from checkmate.memory import measure_peak

RESULTS = Path(__file__).parent / "results" / "step.jsonl"
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0)
QUICK = ("mlp", "resnet18", "gpt2-sdpa")
HEADER = (
    "network", "threads", "share", "budget", "predicted", "measured", "recomputed", "gap", "of plain", "plan", "bits",
)  # fmt: skip


def rows(case: Case, threads: int, shares: list[float], pairs: int, time_limit: float) -> Iterator[dict[str, Any]]:
    """Measure one network at each share."""
    torch.set_num_threads(threads)
    module, plain, batch = case.make(0)
    problem = checkmate.trace(plain, *batch)
    lowest, keep_all = checkmate.min_budget(problem).peak, problem.keep_all_peak
    measuring.step_and_back(module, plain, batch)
    module.zero_grad(set_to_none=True)
    plain_peak = problem.resident + measure_peak(partial(measuring.step_and_back, module, plain, batch)).peak
    expected = measuring.train(*case.make(0)[:2], [batch] * 3)
    for share in shares:
        module, plain, batch = case.make(0)
        budget = lowest + int(share * (keep_all - lowest))
        compiled = checkmate.compile(plain, budget=budget, time_limit=time_limit)
        began = time.perf_counter()
        with measuring.nothing_on_disk():
            found = measuring.train(module, compiled, [batch] * 3)
        first_steps = time.perf_counter() - began
        solution = compiled.plans[0]
        use = measure_peak(partial(measuring.step_and_back, module, compiled, batch))
        plain_seconds, compiled_seconds, ratio = measuring.paired_times(module, plain, compiled, batch, pairs)
        yield {
            "model": case.name,
            "ops": len(problem.graph.ops),
            "threads": threads,
            "share": share,
            "budget": budget,
            "min_budget": lowest,
            "keep_all_peak": keep_all,
            "plain_peak": plain_peak,
            "predicted_peak": solution.peak,
            "measured_peak": solution.problem.resident + use.peak,
            "resident": problem.resident,
            "method": solution.method,
            "status": solution.status.label,
            "overhead": solution.overhead,
            "gap": solution.gap,
            "plain_seconds": plain_seconds,
            "compiled_seconds": compiled_seconds,
            "time_ratio": ratio,
            "pairs": pairs,
            "plan_seconds": solution.seconds,
            "first_three_steps_seconds": first_steps,
            "bitwise": not differing(found, expected),
        }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        str(row["threads"]),
        f"{row['share']:g}",
        f"{row['budget']:_}",
        f"{row['predicted_peak']:_}",
        f"{row['measured_peak']:_}",
        f"{row['overhead']:.1%}",
        f"{row['gap']:.1%}",
        f"{row['time_ratio']:.3f}x",
        f"{row['plan_seconds']:.1f} s",
        "same" if row["bitwise"] else "DIFFER",
    ]


def origin() -> dict[str, str]:
    """Where and when a row was made."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    cpu = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    """Measure what was asked for, append the rows to the file, and print them as a table."""
    parser = argparse.ArgumentParser(description="Time compiled against plain steps.")
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs of steps")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds to plan for one budget")
    parser.add_argument("--quick", action="store_true", help="three networks, one thread, three budgets, few pairs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.networks) - set(CASES):
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if args.quick:
        args.threads, args.shares, args.pairs, args.time_limit = [1], [0.25, 0.75, 2.0], 6, 5.0
    names = args.networks or (QUICK if args.quick else CASES)
    about, measured = origin(), []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for threads in args.threads:
            for name in names:
                torch._dynamo.reset()
                for row in rows(CASES[name], threads, args.shares, args.pairs, args.time_limit):
                    out.write(json.dumps({**about, **row}) + "\n")
                    out.flush()
                    measured.append(_cells(row))
                    print("  ".join(measured[-1]), flush=True)
    print("\n" + measuring.table(HEADER, measured))


if __name__ == "__main__":
    main()
