"""Random programs, plainly and compiled at three budgets: the same bits, refused and why, wrong, or a raw error.

    python -m benchmarks.hunt [PROGRAM ...] [--count 22000] [--start 0] [--block 200] [--jobs 1] [--seconds 60]
                              [--small] [--report] [--out benchmarks/results/hunt.jsonl]

Each number is a program: parameters, inputs and statements that plain PyTorch accepts, and how it is trained. Blocks of
numbers run one after the other in processes of their own, and one row for each block is appended to the file: what came
of how many, refusals by reason, and the numbers of those that were wrong or ended in a raw error. A program takes so
many seconds of its process's own time at most. A run goes on where the one before it ended: blocks that have a row are
left out. Programs from number 22000 on may run by kernels that Inductor compiles, and take some seconds each.

Programs that are named, by number or as files, run here and are printed; ``--small`` leaves out what is not needed for
what came of them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.rows import Row, append, documented, origin, read
from benchmarks.hunt.reduce import reduced
from benchmarks.hunt.run import outcome
from benchmarks.hunt.write import program

RESULTS = Path(__file__).parents[1] / "results" / "hunt.jsonl"
WAIT = 10.0  # times its own seconds is how long a program is waited for, on a busy machine
NAMED = ("wrong", "far", "raw", "no end")  # outcomes whose programs a row names
OUTCOMES = {
    "same": "same bits",
    "refused": "refused",
    "plain": "plain PyTorch refuses too",
    "trained": "only plain PyTorch refuses",
    "wavering": "plain PyTorch does not repeat itself",
    "wrong": "other bits",
    "far": "numbers of fused kernels far from those of plain PyTorch",
    "raw": "raw exception",
    "no end": "no end",
}


def _tried(numbers: range, seconds: int) -> Iterator[Row]:
    """The outcome of each program, run in this process."""
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries warn of
    for number in numbers:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield outcome(program(number))


def _outcomes(numbers: range, seconds: int) -> Iterator[Row]:
    """Give the outcome of each program, from processes of which the next goes on where one has ended."""
    while numbers:
        try:
            for row in apart(partial(_tried, numbers, seconds), patience=WAIT * seconds):
                numbers = numbers[1:]
                yield row
        except EndedEarly as end:
            numbers = numbers[1:]
            late = {"outcome": "no end", "why": f"after {seconds} seconds"}
            yield late if end.late else {"outcome": "raw", "why": str(end)}


def block(numbers: range, seconds: int) -> Row:
    """The row of a block of programs."""
    began, found = time.monotonic(), [*_outcomes(numbers, seconds)]
    kinds = ("refused", "raw", "no end")
    by_reason = {kind: Counter[str](row["why"] for row in found if row["outcome"] == kind) for kind in kinds}
    return {
        "first": numbers.start,
        "programs": len(numbers),
        "outcomes": Counter(row["outcome"] for row in found),
        **{kind: dict(reasons.most_common()) for kind, reasons in by_reason.items() if reasons},
        "named": {n: row["outcome"] for n, row in zip(numbers, found, strict=True) if row["outcome"] in NAMED},
        "swaps": sum(row.get("swaps", 0) for row in found),
        "seconds": round(sum(row.get("seconds", 0.0) for row in found), 1),
        "wall_seconds": round(time.monotonic() - began, 1),
    }


def run(blocks: list[range], jobs: int, seconds: int) -> Iterator[Row]:
    """The row of each block, as they end."""
    about = origin()
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(block, numbers, seconds) for numbers in blocks]):
            yield {**about, **done.result()}


def counts(rows: list[Row]) -> str:
    """All rows together, in a few lines."""
    total: Counter[str] = sum((Counter(row["outcomes"]) for row in rows), Counter())
    reasons: Counter[str] = sum((Counter(row.get("refused", {})) for row in rows), Counter())
    lines = [f"{sum(total.values())} programs, {sum(row['seconds'] for row in rows) / 3600:.1f} hours of one core"]
    lines += [f"{total[kind]:>6}  {told}" for kind, told in OUTCOMES.items()]
    lines += ["", "refused, most often:", *(f"{n:>6}  {why}" for why, n in reasons.most_common(20))]
    lines += [f"{kind}: program {n}" for row in rows for n, kind in row["named"].items()]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = documented(__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="numbers, or files, to run here")
    parser.add_argument("--count", type=int, default=22_000, help="where the programs end")
    parser.add_argument("--start", type=int, default=0, help="the first; those from 22000 on may have fused kernels")
    parser.add_argument("--block", type=int, default=200, help="programs in one row")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=60, help="of its own time that a program may take")
    parser.add_argument("--small", action="store_true", help="make the programs that are named small")
    parser.add_argument("--report", action="store_true", help="only print the counts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for name in args.programs:
        text = program(int(name)) if name.isdigit() else Path(name).read_text()
        text = reduced(text) if args.small else text
        print(f"{text}\n# {json.dumps(outcome(text))}")
    if args.programs:
        return
    known = {(row["first"], row["programs"]) for row in read(args.out)}
    every = (range(i, min(i + args.block, args.count)) for i in range(args.start, args.count, args.block))
    blocks = [numbers for numbers in every if not args.report and (numbers.start, len(numbers)) not in known]
    for row in run(blocks, args.jobs, args.seconds):
        append(args.out, row)
        print(f"{row['first']:>6} to {row['first'] + row['programs'] - 1}: {dict(row['outcomes'])}", flush=True)
    print(counts(read(args.out)))
