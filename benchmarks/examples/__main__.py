"""What the scripts of ``examples/`` print: bytes of plain PyTorch, planned and measured.

    python -m benchmarks.examples [gpt2 lora ...]

Each runs in a process of its own, on the CPU, in about a minute at most. A row for each has the bytes as it printed
them, to three or four digits, and its lines.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.units import parse_bytes

ROOT = Path(__file__).parents[2]
NAMES = ("gpt2", "resnet", "lora", "diffusion", "lightning_callback", "whole_step", "second_memory")
PRINTED = re.compile(r"^(?:plain \S+ takes|planned are|measured are) ([\d.]+ \w?B)", re.MULTILINE)


def printed(name: str) -> list[Row]:
    """The row of a script."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = [line for line in run.stdout.splitlines() if PRINTED.match(line)]
    plain, planned, measured = (parse_bytes(size) for size in PRINTED.findall(run.stdout))
    return [{"example": name, "plain": plain, "planned": planned, "measured": measured, "printed": lines}]


def _cells(row: Row) -> list[str]:
    return [row["example"], *(f"{row[key] / 1e6:.2f} MB" for key in ("plain", "planned", "measured"))]


BENCHMARK = Benchmark(
    about=__doc__,
    file="examples.jsonl",
    measure=printed,
    header=("example", "plain PyTorch", "planned", "measured"),
    cells=_cells,
    names=NAMES,
    packages=("torch", "transformers", "peft", "lightning", "diffusers", "accelerate"),
    environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
)

if __name__ == "__main__":
    BENCHMARK.run()
