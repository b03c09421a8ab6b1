"""A script that is timed from its imports on: it imports nothing before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def started(packages: list[str], **options: Any) -> Iterator[dict[str, Any]]:
    """Import packages, and train by `benchmarks.start.seconds.steps`: its rows, with the seconds of the imports.

    Args:
        packages: what a script of this kind imports.
        options: of `steps`.
    """
    began = time.process_time()
    for package in packages:
        import_module(package)
    imported = time.process_time() - began
    time.perf_counter = time.process_time
    import_module("torch").set_num_threads(1)
    for row in import_module("benchmarks.start.seconds").steps(**options):
        yield {"import_seconds": imported, **row}
