"""Every language model that transformers lists, and one network of each family of timm: right, or refused, and why.

    python -m benchmarks.census [MODEL ...] [--again STATUS,...] [--jobs 2] [--seconds 90] [--here] [--report]
                                [--out benchmarks/results/census.jsonl]

Each is built tiny, with random weights, in a process of its own, and trained for two steps: plainly, plainly again from
the same state, and compiled at 30 % of the way from the smallest budget to keeping everything. What plain PyTorch does
not train, or does not repeat bit for bit, is not counted. One row for each model is appended to the file; the last one
counts. A run goes on where the one before it ended: models that have a row are left out, unless they are named, or
their status is (``--again refused,wrong``, ``--again all``). ``--here`` runs models in this process, with the traceback
of what fails, and writes no row. ``--report`` only prints the counts and writes results/census.md.

The limit of seconds is of each process's own time, so that what else the machine does ends no model early. It takes an
hour of two idle cores. timm asks for torchvision, whose compiled ops load beside PyTorch for CUDA only; its networks
need none of these, and the census does without, given a torchvision of PyTorch's age:

    .venv/bin/pip install --no-deps --target build/timm timm "torchvision==0.28.*"  # beside PyTorch 2.13
    OMP_NUM_THREADS=1 PYTHONPATH=build/timm .venv/bin/python -m benchmarks.census
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib import metadata
from pathlib import Path

from benchmarks.census import images, report, study, text
from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.rows import Row, append, documented, origin

RESULTS = Path(__file__).parents[1] / "results" / "census.jsonl"
BYTES = 10 << 30  # of address space for one process
WAIT = 6.0  # times its own seconds is how long a process is waited for, on a busy machine


def listed() -> dict[str, tuple[str, ...]]:
    """Every model by name: its library, and what it is there."""
    of_text = {name: ("transformers", *tasks) for name, tasks in text.models().items()}
    return of_text | {name: ("timm", family) for name, family in images.models().items()}


def _studied(name: str, seconds: int) -> Iterator[Row]:
    """Tell each stage of the model as it begins, and in the end its row."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of hundreds of models
    at = "plain"
    try:
        for row in study.study(name):
            at = row.get("at", at)
            yield row
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what came of the model
        row = study.failure(error, at)
    yield {**row, "seconds": round(time.process_time(), 1)}


def run_apart(name: str, seconds: int) -> Row:
    """A model's row, from a process that ends with it."""
    row: Row = {"at": "plain"}
    began = time.monotonic()
    try:
        for told in apart(partial(_studied, name, seconds), patience=WAIT * seconds, method="forkserver"):
            row = told
    except EndedEarly as end:
        said = f"no end after {seconds} seconds" if end.late else str(end)
        status = "untrained" if row["at"] == "plain" else "timeout" if end.late else "error"
        row = {**row, "status": status, "error": said, "seconds": float(seconds)}
    return {**row, "wall_seconds": round(time.monotonic() - began, 1)}


def chosen(names: Sequence[str], again: Sequence[str], rows: dict[str, Row]) -> list[str]:
    """The models to run: those named, or of a status to try again, or without a row."""
    if names:
        return list(names)
    if again:
        return [name for name in listed() if name in rows and ("all" in again or rows[name]["status"] in again)]
    return [name for name in listed() if name not in rows]


def run(names: Sequence[str], jobs: int, seconds: int) -> Iterator[Row]:
    """The row of each model, as they end."""
    preloaded = ["benchmarks.census.study", "torch._dynamo", "torch._functorch.aot_autograd"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    about, kinds = origin(), listed()
    versions = {library: metadata.version(library) for library in {kind[0] for kind in kinds.values()}}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_apart, name, seconds): name for name in names}
        try:
            for future in as_completed(running):
                library, *kind = kinds[running[future]]
                listing = {"model": running[future], "library": library, "version": versions[library], "kind": kind}
                yield {**about, **listing, **future.result()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    """Run what was asked for, append the rows to the file, and print the counts."""
    parser = documented(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names; by default all that have no row yet")
    parser.add_argument("--again", default="", help="run models whose last row has one of these statuses, or all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=int, default=90, help="of its own time that a process may take")
    parser.add_argument("--here", action="store_true", help="in this process, with tracebacks, without rows")
    parser.add_argument("--report", action="store_true", help="only print the counts, and write them into the docs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    kinds = listed()
    if images.MISSING:
        print(images.MISSING)
    if unknown := set(args.models) - set(kinds):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    if args.here:
        for name in args.models:
            for row in study.study(name):
                print(json.dumps(row, indent=1))
        return
    if not args.report:
        names = chosen(args.models, [s for s in args.again.split(",") if s], report.by_model(args.out))
        for i, row in enumerate(run(names, args.jobs, args.seconds), 1):
            append(args.out, row)
            print(f"{i:>3}/{len(names)}  {row['model']}: {report.short(row)}", flush=True)
    rows = report.by_model(args.out)
    print("\n" + report.counts(rows))
    if args.report:
        args.out.with_suffix(".md").write_text(report.markdown(rows))
