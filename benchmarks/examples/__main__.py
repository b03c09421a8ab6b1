"""What the scripts of ``examples/`` print: bytes of plain PyTorch, planned and measured.

    python -m benchmarks.examples [gpt2 lora ...]

Each runs in a process of its own, on the CPU, in about a minute at most. A row for each has the bytes as it printed
them, to three or four digits, and its lines.
"""

from __future__ import annotations

from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.examples.scripts import NAMES, ROOT, printed


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
