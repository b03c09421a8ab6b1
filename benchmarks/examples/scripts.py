"""The scripts of ``examples/``, each run in a process of its own, and the bytes that it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.common.rows import Row
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
