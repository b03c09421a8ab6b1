"""Seconds until a script trains: started for the first time, a second time, and with a smaller batch after a larger.

    python -m benchmarks.start [NETWORK ...] [--share 0.25] [--time-limit 10] [--out benchmarks/results/start.jsonl]

Each start is a process of its own, with one thread; both share a cache folder that is empty before the first. A row
says for the whole batch and for the smaller one after it how long the first step took in all, and planning within it,
and what the plans are like; and how long planning takes for the smaller batch from nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import checkmate
from benchmarks import measuring
from benchmarks.step import origin
from checkmate.files import VARIABLE
from tests.models import CASES

RESULTS = Path(__file__).parent / "results" / "start.jsonl"
NETWORKS = ("resnet18", "gpt2-sdpa", "resnet50", "gpt2-4")
SMALLER = 0.8  # of the batch
HEADER = ("network", "ops", "batch", "planned", "again", "from nothing", "first step", "again", "gap", "again")


def starts(name: str, budget: int, time_limit: float, *, whole: bool = True) -> list[dict[str, Any]]:
    """Train a step with the whole batch and one with the smaller one; what each took. In a process that just began."""
    torch.set_num_threads(1)
    _, step, batch = CASES[name].make(0)
    batches = [batch] * whole + [tuple(tensor[: int(SMALLER * len(tensor))] for tensor in batch)]
    compiled = checkmate.compile(step, budget=budget, time_limit=time_limit)
    rows = []
    for some in batches:
        began = time.perf_counter()
        compiled(*some).backward()
        solution = compiled.plans[-1]
        rows.append(
            {
                "batch": len(some[0]),
                "ops": len(solution.problem.graph.ops),
                "step_seconds": time.perf_counter() - began,
                "plan_seconds": solution.seconds,
                "overhead": solution.overhead,
                "gap": solution.gap,
                "peak": solution.peak,
                "from": solution.details.get("from"),
            }
        )
    return rows


def budget_of(name: str, share: float) -> int:
    """The budget at a share of the way from the smallest to keeping everything."""
    torch.set_num_threads(1)
    _, step, batch = CASES[name].make(0)
    problem = checkmate.trace(step, *batch)
    smallest = problem.min_budget().peak
    return smallest + int(share * (problem.keep_all_peak - smallest))


def _in_a_process(folder: str, *arguments: object) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.start", "--once", *map(str, arguments)]
    environment = {**os.environ, VARIABLE: folder}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def row(name: str, share: float, time_limit: float) -> dict[str, Any]:
    """All starts of one network."""
    budget = budget_of(name, share)
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (_in_a_process(folder, name, budget, time_limit) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        nothing = _in_a_process(folder, name, budget, time_limit, "alone")
    about = {"model": name, "share": share, "budget": budget, "time_limit": time_limit, "threads": 1}
    return {**about, "cold": cold, "warm": warm, "smaller_from_nothing": nothing[0]}


def _cells(row: dict[str, Any]) -> list[list[str]]:
    lines = []
    for first, second, nothing in zip(row["cold"], row["warm"], [None, row["smaller_from_nothing"]], strict=True):
        seconds = [first["plan_seconds"], second["plan_seconds"], nothing and nothing["plan_seconds"]]
        seconds += [first["step_seconds"], second["step_seconds"]]
        shown = ["" if s is None else f"{s:.2f} s" for s in seconds]
        gaps = [f"{start['gap']:.2%}" for start in (first, second)]
        lines.append([row["model"], str(first["ops"]), str(first["batch"]), *shown, *gaps])
    return lines


def main() -> None:
    """Measure what was asked for, append the rows to the file, and print them as a table."""
    parser = argparse.ArgumentParser(description="Time the first and the second start of a script.")
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(CASES)}")
    parser.add_argument("--share", type=float, default=0.25, help="of the way from the smallest budget to keeping all")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds to plan")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    names = args.networks or NETWORKS
    if unknown := set(names) - set(CASES):
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    about, measured = origin(), []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as out:
        for name in names:
            found = row(name, args.share, args.time_limit)
            out.write(json.dumps({**about, **found}) + "\n")
            out.flush()
            measured += _cells(found)
    print(measuring.table(HEADER, measured))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        network, budget, time_limit, *alone = sys.argv[2:]
        print(json.dumps(starts(network, int(budget), float(time_limit), whole=not alone)))
    else:
        main()
