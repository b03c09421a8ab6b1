"""What is timed from the imports on, so that it imports nothing before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def started(packages: list[str], own: bool, threads: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Import packages, and train by `benchmarks.start.seconds.steps`: its rows, with the seconds of the imports.

    Args:
        packages: what a script of this kind imports.
        own: whether seconds are those that the process computes, not those of the clock.
        threads: of PyTorch.
        options: of `steps`.
    """
    clock = time.process_time if own else time.perf_counter
    began = clock()
    for package in packages:
        import_module(package)
    imported = clock() - began
    time.perf_counter = clock
    import_module("torch").set_num_threads(threads)
    for row in import_module("benchmarks.start.seconds").steps(**options):
        yield {"import_seconds": imported, **row}
