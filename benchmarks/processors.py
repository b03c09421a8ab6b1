"""Whether the tests of equal bits hold with other kernels: those of lesser processors, and on two threads.

    python -m benchmarks.processors [NAME=VALUE ...] [--threads N ...] [--tests FILE ...]

Which kernels run depends on the processor, and on variables of the environment that are read when a process begins:
ATen, oneDNN and MKL each have one that keeps them from the newest instructions. For each setting and number of threads
the tests run in a process of their own, and leave a row: how many passed, failed and were skipped, the names of those
that failed, and the seconds that the process has computed. A setting is a lower limit or none where the processor lacks
the instructions. Tests with the fixture ``one_thread`` have one thread, whatever is asked for.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.suite import counted

VALUES = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("AVX2", "AVX512_CORE"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2"),
}
SETTINGS = tuple(f"{name}={value}" for name, values in VALUES.items() for value in values)
TESTS = {  # by markers
    "not slow": (
        *("tests/training/test_habits.py", "tests/training/test_families.py", "tests/memory/test_arena.py"),
        *("tests/capture/loss", "tests/capture/inplace"),
        *("tests/profiling/test_trial.py", "tests/codegen/test_writing_over.py"),
    ),
    "not long": (
        *("tests/training/test_random_programs.py", "tests/updates/test_random_updates.py"),
        "tests/training/test_training_step.py::test_same_numbers_within_the_budget",
    ),
}
HEADER = ("setting", "threads", "passed", "failed", "skipped", "seconds", "what failed")
SHOWN = 60  # characters of the names of what failed


def rows(name: str, threads: int, tests: Sequence[str]) -> list[Row]:
    """Run tests, or those of `TESTS`, with a setting ``NAME=VALUE`` and no other of its kind."""
    variable, _, value = name.partition("=")
    environment = {known: what for known, what in os.environ.items() if known not in VALUES}
    environment |= {variable: value, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    counts = counted({"not slow": tests} if tests else TESTS, "-q", environment=environment)
    return [{"setting": name, "threads": threads, **counts, "seconds": _computed()}]


def _computed() -> float:
    """Seconds that processes begun by this one have computed, as far as they have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cells(row: Row) -> list[str]:
    """What is printed of a row."""
    counts = [str(row[key]) for key in ("threads", "passed", "failed", "skipped")]
    return [row["setting"], *counts, f"{row['seconds']:.0f}", ", ".join(row["names"])[:SHOWN]]


BENCHMARK = Benchmark(
    __doc__,
    "processors.jsonl",
    rows,
    HEADER,
    cells,
    names=SETTINGS,
    options={"threads": ((1, 2), "of PyTorch"), "tests": ([], "quick ones, as pytest takes them, instead of TESTS")},
)

if __name__ == "__main__":
    BENCHMARK.run()
