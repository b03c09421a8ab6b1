"""A lock among the processes of a benchmark: what is timed or measured waits until no other does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "CHECKMATE_BENCHMARK_LOCK"  # of the environment: the file that is locked; without it nobody waits


@contextmanager
def alone() -> Iterator[None]:
    """Let no other process that shares the file be in such a block meanwhile."""
    if (name := os.environ.get(VARIABLE)) is None:
        yield
        return
    with Path(name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
