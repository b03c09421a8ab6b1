"""Run Python in processes of its own, from the root of the repository; where that fails, the test shows its output."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process printed that ended well: ``run_python("-c", "print(1)", OMP_NUM_THREADS="1").stdout``."""
    env = {**os.environ, **environment}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def start_ranks(run: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call ``run(rank, *arguments)`` in a process for each rank, forked from one that has PyTorch loaded already."""
    from torch.multiprocessing.spawn import start_processes

    multiprocessing.set_forkserver_preload(["torch.distributed", "torch._dynamo", "checkmate.compiler"])
    start_processes(run, arguments, nprocs=ranks, start_method="forkserver")
