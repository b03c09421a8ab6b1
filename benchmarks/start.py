"""Seconds until a script trains: started for the first time, a second time, and with a smaller batch after a larger.

    python -m benchmarks.start [NETWORK ...] [--threads 1] [--share 0.25] [--time-limit 60] [--peers]
                               [--out benchmarks/results/start.jsonl]

Each start is a process of its own; both share a cache folder that is empty before the first. A row says how long the
imports took; for the whole batch, and for the smaller one after it, how long the first step took in all, measuring and
planning within it, and a second step, and what the plans are like; and how long planning takes for the smaller batch
from nothing. With ``--peers`` it says the same of the first step with other backends of `torch.compile`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks.common.rows import Row, add_names, append, origin
from benchmarks.common.timing import budget_at
from benchmarks.networks import CASES, CLASSES, Case, Step
from benchmarks.networks.resnet import resnet50
from checkmate.core.files import VARIABLE
from checkmate.core.table import Table

RESULTS = Path(__file__).parent / "results" / "start.jsonl"
NETWORKS = ("resnet18", "gpt2-sdpa", "resnet50", "gpt2-4")
PEERS = ("inductor", "aot_eager")
SMALLER = 0.8  # of the batch
HEADER = (
    "network", "threads", "ops", "batch", "first step", "again", "measured", "planned", "again", "from nothing",
    "second step", "gap", "again",
)  # fmt: skip
IN_A_PROCESS = """
import sys, time
began = time.perf_counter()
import torch
if sys.argv[1] == "checkmate":
    import checkmate
imported = time.perf_counter() - began
from benchmarks import start
start.once(imported, *sys.argv[1:])
"""


def _resnet50(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module = resnet50(CLASSES)

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(module(x), target)

    return module, step, (torch.randn(8, 3, 96, 96), torch.randint(CLASSES, (8,)))


KNOWN = {**CASES, "resnet50-wide": Case("resnet50-wide", _resnet50)}


class _Measured(logging.Handler):
    """Adds up the seconds that the library says it measured ops for."""

    seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Measured") and isinstance(record.args, tuple):
            self.seconds += float(str(record.args[1]))


def starts(name: str, budget: int, time_limit: float, *, whole: bool = True) -> list[Row]:
    """Train a step with the whole batch and one with the smaller one; what each took. In a process that just began."""
    _, step, batch = KNOWN[name].make(0)
    batches = [batch] * whole + [tuple(tensor[: int(SMALLER * len(tensor))] for tensor in batch)]
    measured = _Measured()
    logging.getLogger("checkmate.profiling").addHandler(measured)
    logging.getLogger("checkmate.profiling").setLevel(logging.INFO)
    compiled = checkmate.compile(step, budget=budget, time_limit=time_limit)
    rows = []
    for some in batches:
        measured.seconds = 0.0
        first, second = _seconds(compiled, some), _seconds(compiled, some)
        solution = compiled.plans[-1]
        rows.append(
            {
                "batch": len(some[0]),
                "ops": len(solution.problem.graph.ops),
                "step_seconds": first,
                "measure_seconds": measured.seconds,
                "plan_seconds": solution.seconds,
                "second_step_seconds": second,
                "overhead": solution.overhead,
                "gap": solution.gap,
                "peak": solution.peak,
                "from": solution.origin or None,
            }
        )
    return rows


def peer(name: str, backend: str) -> list[Row]:
    """Train a step with another backend; what it took. In a process that just began."""
    _, step, batch = KNOWN[name].make(0)
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    first, second = _seconds(compiled, batch), _seconds(compiled, batch)
    return [{"batch": len(batch[0]), "step_seconds": first, "second_step_seconds": second}]


def _seconds(step: Step, batch: tuple[Tensor, ...]) -> float:
    began = time.perf_counter()
    step(*batch).backward()
    return time.perf_counter() - began


def once(imported: float, backend: str, threads: str, name: str, *options: str) -> None:
    """Print what one start took, as JSON; ``imported``: seconds of the imports."""
    torch.set_num_threads(int(threads))
    if backend == "checkmate":
        budget, time_limit, *alone = options
        rows = starts(name, int(budget), float(time_limit), whole=not alone)
    else:
        rows = peer(name, backend)
    print(json.dumps([{**row, "import_seconds": imported, "threads": torch.get_num_threads()} for row in rows]))


def budget_of(name: str, share: float) -> int:
    """The budget at a share of the way from the smallest to keeping everything."""
    _, step, batch = KNOWN[name].make(0)
    problem = checkmate.trace(step, *batch)
    return budget_at(share, checkmate.min_budget(problem).peak, problem.keep_all_peak)


def _in_a_process(folder: str, *arguments: object) -> list[Row]:
    """What `once` prints, in a process whose caches are in this folder."""
    command = [sys.executable, "-c", IN_A_PROCESS, *map(str, arguments)]
    environment = {**os.environ, VARIABLE: folder, "TORCHINDUCTOR_CACHE_DIR": folder}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: list[Row] = json.loads(run.stdout.splitlines()[-1])
    return found


def _cold_and_warm(*arguments: object) -> dict[str, list[Row]]:
    with tempfile.TemporaryDirectory() as folder:
        return {start: _in_a_process(folder, *arguments) for start in ("cold", "warm")}


def row(name: str, threads: int, share: float, time_limit: float, peers: bool) -> Row:
    """All starts of one network."""
    torch.set_num_threads(threads)
    budget = budget_of(name, share)
    ours = ("checkmate", threads, name, budget, time_limit)
    found: Row = _cold_and_warm(*ours)
    with tempfile.TemporaryDirectory() as folder:
        found["smaller_from_nothing"] = _in_a_process(folder, *ours, "alone")[0]
    if peers:
        found["peers"] = {backend: _cold_and_warm(backend, threads, name) for backend in PEERS}
    return {"model": name, "share": share, "budget": budget, "time_limit": time_limit, "threads": threads, **found}


def _cells(row: Row) -> list[list[str]]:
    lines = []
    for first, second, nothing in zip(row["cold"], row["warm"], [None, row["smaller_from_nothing"]], strict=True):
        seconds = [first["step_seconds"], second["step_seconds"], first["measure_seconds"]]
        seconds += [first["plan_seconds"], second["plan_seconds"], nothing and nothing["plan_seconds"]]
        seconds += [first["second_step_seconds"]]
        shown = ["" if s is None else f"{s:.2f} s" for s in seconds]
        gaps = [f"{start['gap']:.2%}" for start in (first, second)]
        lines.append([row["model"], str(row["threads"]), str(first["ops"]), str(first["batch"]), *shown, *gaps])
    for backend, both in row.get("peers", {}).items():
        (first,), (second,) = both["cold"], both["warm"]
        shown = [f"{start['step_seconds']:.2f} s" for start in (first, second)]
        later = f"{first['second_step_seconds']:.2f} s"
        lines.append([backend, str(row["threads"]), "", str(first["batch"]), *shown, *[""] * 4, later, "", ""])
    return lines


def main() -> None:
    """Measure what was asked for, append the rows to the file, and print them as a table."""
    parser = argparse.ArgumentParser(description="Time the first and the second start of a script.")
    add_names(parser, KNOWN, NETWORKS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--share", type=float, default=0.25, help="of the way from the smallest budget to keeping all")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds to plan; that of checkmate.compile")
    parser.add_argument("--peers", action="store_true", help=f"time the starts with {' and '.join(PEERS)}, too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about, measured = origin(), []
    for threads in args.threads:
        for name in args.names:
            found = row(name, threads, args.share, args.time_limit, args.peers)
            append(args.out, {**about, **found})
            measured += _cells(found)
    print(Table(HEADER, measured, HEADER[1:]))


if __name__ == "__main__":
    main()
