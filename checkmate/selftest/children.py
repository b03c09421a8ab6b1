"""Run each check in a process of its own: one that fails, hangs or stops the device takes no other with it.

A process that has not touched the device is forked for each where the system can, so that PyTorch is imported once.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkmate.memory.available import limits
from checkmate.selftest.check import REPORT, Check, Finding, Result, Setting

MOST = 6  # checks at a time
OF_A_CHECK = 3 * 10**9  # bytes of memory
LAST = 4000  # characters of what a process has printed that are kept of a check that failed
VERDICTS = {True: "passed", False: "failed", None: "skipped"}


def run_all(checks: Sequence[Check], setting: Setting, limit: float | None = None) -> Iterator[Result]:
    """Results of the checks, in their order; ``limit``: seconds for each, in place of its own.

    Several run at a time where processors and memory allow; those that need the device for themselves come last.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["checkmate.selftest.catalogue"])

    def run(check: Check, after: Sequence[Future[Result]] = ()) -> Result:
        wait(after)
        return _run(context, check, setting, check.seconds if limit is None else limit)

    pools = beside, alone = ThreadPoolExecutor(places()), ThreadPoolExecutor(1)
    others = {i: beside.submit(run, check) for i, check in enumerate(checks) if not check.alone}
    found = [others.get(i) or alone.submit(run, check, [*others.values()]) for i, check in enumerate(checks)]
    try:
        for future in found:
            yield future.result()
    finally:  # where whoever asked has left, what has not begun does not begin
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def places() -> int:
    """The number of checks to run at a time, by processors and memory."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = min((limit.free for limit in limits()), default=0)
    return max(1, min(MOST, processors, free // OF_A_CHECK))


def _run(context: Any, check: Check, setting: Setting, limit: float) -> Result:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="checkmate-selftest-") as folder:
        printed = Path(folder) / "printed"
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(check, setting, sender, str(printed)))
        child.start()
        sender.close()
        finding = _received(receiver, child, limit)
        receiver.close()
        said = printed.read_text(errors="replace")[-LAST:] if printed.exists() else ""
    facts = {**finding.facts, **({"printed": said} if said and finding.passed is False else {})}
    verdict, seconds = VERDICTS[finding.passed], time.monotonic() - began
    about = check.name, check.checked, check.expected
    return Result(*about, verdict, finding.found, finding.advice, seconds, facts)


def _received(receiver: Connection, child: Any, limit: float) -> Finding:
    """What the process sends, or what became of it; it has ended then."""
    try:
        if not receiver.poll(limit):
            return Finding(False, f"it had not ended after {limit:g} s", f"Try --time-limit {2 * limit:g}. {REPORT}")
        found: Finding = receiver.recv()
        return found
    except EOFError:
        child.join()
        return Finding(False, f"its process died (exit code {child.exitcode})")
    finally:
        child.join(1.0)  # a device that was stopped may keep a process from ending
        if child.is_alive():
            child.kill()
            child.join()


def _child(check: Check, setting: Setting, sender: Connection, printed: str) -> None:
    """Run a check, with all that it prints in a file, and costs of ops measured anew and not kept."""
    to = os.open(printed, os.O_WRONLY | os.O_CREAT)
    os.dup2(to, 1)
    os.dup2(to, 2)
    with tempfile.TemporaryDirectory(prefix="checkmate-selftest-") as folder:
        os.environ["CHECKMATE_CACHE_DIR"] = folder
        try:
            finding = check.run(setting)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what this check found
            first = (str(error).strip().splitlines() or [""])[0]
            facts = {"traceback": traceback.format_exc()}
            finding = Finding(False, f"{type(error).__name__}: {first}", facts=facts)
        sender.send(finding)
        sender.close()
