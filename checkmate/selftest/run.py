"""Run each check in a separate process, so that a failing or hanging check does not affect the next.

A process that has not touched the device is forked for each where the system can, so that PyTorch is imported once.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkmate.memory.available import limits

REPORT = "Please report it, with the file that --json writes."
MOST = 6  # checks at a time
OF_A_CHECK = 3 * 10**9  # bytes of memory
LAST = 4000  # characters of what a process has printed that are kept of a check that failed
VERDICTS = {True: "passed", False: "failed", None: "skipped"}


@dataclass(frozen=True)
class Setting:
    """The device for the checks, and the size of their networks."""

    name: str  # of the device: "cpu", "cuda", "cuda:1"
    quick: bool = False  # small networks

    @property
    def device(self) -> torch.device:
        """The device itself; a CUDA device by its number."""
        device = torch.device(self.name)
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@dataclass(frozen=True)
class Finding:
    """A finding of a check."""

    passed: bool | None  # None: there is nothing to check on this device
    found: str
    advice: str = REPORT  # what to do if it failed
    facts: dict[str, Any] = field(default_factory=dict)  # for JSON


@dataclass(frozen=True)
class Check:
    """A check in the list."""

    name: str
    checked: str
    expected: str
    run: Callable[[Setting], Finding]  # at the top of a module: it is called in another process
    seconds: float = 120.0  # after which it is ended, and has failed
    alone: bool = False  # it needs the device for itself


@dataclass(frozen=True)
class Result:
    """The report of a finished check."""

    name: str
    checked: str
    expected: str
    verdict: str  # "passed", "failed" or "skipped"
    found: str
    advice: str
    seconds: float
    facts: dict[str, Any]

    def __str__(self) -> str:
        head = f"{self.verdict if self.verdict != 'failed' else 'FAILED':<9}{self.name}  ({self.seconds:.1f} s)"
        lines = [("checked", self.checked), ("expected", self.expected), ("found", self.found)]
        lines += [("do", self.advice)] if self.verdict == "failed" else []
        return "\n".join([head, *(f"           {title:<10}{text}" for title, text in lines)])


def run_all(checks: Sequence[Check], setting: Setting, limit: float | None = None) -> Iterator[Result]:
    """Run the checks and yield their results; ``limit``: seconds for each, instead of the check's.

    Several run at a time where processors and memory allow; those that need the device for themselves come last.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["checkmate.selftest.checks"])
    run = partial(_run, context, setting, limit)
    pool = ThreadPoolExecutor(places())
    try:
        yield from pool.map(run, [check for check in checks if not check.alone])
        yield from map(run, [check for check in checks if check.alone])
    finally:  # where whoever asked has left, what has not begun does not begin
        pool.shutdown(wait=False, cancel_futures=True)


def places() -> int:
    """The number of checks to run at a time, from processors and memory."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = min((limit.free for limit in limits()), default=0)
    return max(1, min(MOST, processors, free // OF_A_CHECK))


def _run(context: Any, setting: Setting, limit: float | None, check: Check) -> Result:
    began, limit = time.monotonic(), check.seconds if limit is None else limit
    # Run the check in a child until its limit.
    with tempfile.TemporaryDirectory(prefix="checkmate-selftest-") as name:
        folder = Path(name)
        child = context.Process(target=_child, args=(check, setting, folder))
        child.start()
        child.join(limit)
        code = child.exitcode  # None: it still runs
        child.kill()
        child.join()
        # Its answer, or how it ended without one.
        if (answer := folder / "answer").exists():
            finding = pickle.loads(answer.read_bytes())
        elif code is None:
            finding = Finding(False, f"it had not ended after {limit:g} s", f"Try --time-limit {2 * limit:g}. {REPORT}")
        else:
            finding = Finding(False, f"its process died (exit code {code})")
        printed = folder / "printed"
        said = printed.read_text(errors="replace")[-LAST:] if printed.exists() else ""
    facts = {**finding.facts, **({"printed": said} if said and finding.passed is False else {})}
    verdict, seconds = VERDICTS[finding.passed], time.monotonic() - began
    about = check.name, check.checked, check.expected
    return Result(*about, verdict, finding.found, finding.advice, seconds, facts)


def _child(check: Check, setting: Setting, folder: Path) -> None:
    """Run a check with its output in a file; costs of ops are measured anew and not kept."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ["CHECKMATE_CACHE_DIR"] = str(folder / "cache")
    try:
        finding = check.run(setting)
    except Exception as error:  # noqa: BLE001  # any error is this check's finding
        first = (str(error).strip().splitlines() or [""])[0]
        facts = {"traceback": traceback.format_exc()}
        finding = Finding(False, f"{type(error).__name__}: {first}", facts=facts)
    (folder / "partial").write_bytes(pickle.dumps(finding))
    (folder / "partial").replace(folder / "answer")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: a device that was stopped may keep a process from ending in order
