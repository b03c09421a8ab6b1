"""Whether the tests of equal bits hold with other kernels: those of lesser processors, and on two threads.

    python -m benchmarks.processors [TESTS ...] [--settings NAME=VALUE ...] [--threads N ...] [-m MARKERS] [--out FILE]

Which kernels run depends on the processor, and on variables of the environment that are read when a process begins:
ATen, oneDNN and MKL each have one that keeps them from the newest instructions. For each setting and number of threads
the tests run in a process of their own, and leave a row: how many passed, failed and were skipped, the names of those
that failed, and the seconds that the process has computed. A setting is a lower limit or none where the processor lacks
the instructions. Tests with the fixture ``one_thread`` have one thread, whatever is asked for.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common.rows import Row, append, documented, origin
from benchmarks.common.suite import ROOT, counted
from checkmate.core.table import Table

RESULTS = ROOT / "benchmarks" / "results" / "processors.jsonl"
VALUES = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("AVX2", "AVX512_CORE"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2"),
}
SETTINGS = tuple(f"{name}={value}" for name, values in VALUES.items() for value in values)
MARKERS = "not slow"
TESTS = {  # by markers
    MARKERS: (
        *("tests/training/test_habits.py", "tests/training/test_families.py", "tests/memory/test_arena.py"),
        *("tests/backends/test_regions.py", "tests/capture/splits", "tests/capture/ways"),
        *("tests/profiling/test_trial.py", "tests/codegen/test_writing_over.py"),
    ),
    "not long": (
        *("tests/training/test_random_programs.py", "tests/updates/test_random_updates.py"),
        "tests/training/test_training_step.py::test_same_numbers_within_the_budget",
    ),
}
HEADER = ("setting", "threads", "passed", "failed", "skipped", "seconds", "what failed")
SHOWN = 60  # characters of the names of what failed


def run(tests: Mapping[str, Sequence[str]], setting: str, threads: int) -> Row:
    """Run tests, by their markers, each kind in a process, with a setting ``NAME=VALUE`` and no other of its kind."""
    name, _, value = setting.partition("=")
    environment = {known: what for known, what in os.environ.items() if known not in VALUES}
    environment |= {name: value, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    before = _computed()
    counts = counted(tests, "-q", environment=environment)
    return {"setting": setting, "threads": threads, **counts, "seconds": _computed() - before}


def _computed() -> float:
    """Seconds that processes begun here have computed, as far as they have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """One for each setting and number of threads."""
    tests = {args.markers: args.tests} if args.tests else TESTS
    for setting in args.settings:
        for threads in args.threads:
            yield run(tests, setting, threads)


def cells(row: Row) -> list[str]:
    """What is printed of a row."""
    counts = [str(row[key]) for key in ("threads", "passed", "failed", "skipped")]
    return [row["setting"], *counts, f"{row['seconds']:.0f}", ", ".join(row["names"])[:SHOWN]]


def _setting(text: str) -> str:
    if text.partition("=")[0] not in VALUES or not text.partition("=")[2]:
        raise argparse.ArgumentTypeError(f"a setting is NAME=VALUE, NAME one of {', '.join(VALUES)}, not {text!r}")
    return text


def main() -> None:
    """Run the tests in each setting, append a row for each to the file as it is done, and print them as a table."""
    parser = documented(__doc__)
    parser.add_argument("tests", nargs="*", help="files, folders or names, as pytest takes them")
    parser.add_argument("--settings", nargs="+", type=_setting, default=SETTINGS, metavar="NAME=VALUE")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2), metavar="N")
    parser.add_argument("-m", dest="markers", default=MARKERS, help=f'which of TESTS; by default "{MARKERS}"')
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about, made = origin(), []
    for row in rows(args):
        append(args.out, {**about, **row})
        made.append(row)
        print("  ".join(cells(row)), flush=True)
    print("", Table(HEADER, [*map(cells, made)], HEADER[1:6]), sep="\n")


if __name__ == "__main__":
    main()
