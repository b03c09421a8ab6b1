"""Run Python in a process of its own, from the root of the repository; where that fails, the test shows its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process printed that ended well: ``run_python("-c", "print(1)", OMP_NUM_THREADS="1").stdout``."""
    env = {**os.environ, **environment}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run
