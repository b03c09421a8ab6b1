"""Calls elsewhere: answers, failures, processes that die, and low priority for what works beside the training."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest

from checkmate import Problem
from checkmate.errors import SolverError
from checkmate.solvers.common.processes import NICENESS, BackgroundCall, Process, Processes
from tests.support.processes import ROOT
from tests.support.sampling import slow


def test_calls_run_elsewhere_and_answer() -> None:
    with Processes(2) as processes:
        pids = [processes.submit(os.getpid) for _ in range(3)]
        assert len({os.getpid(), *(pid.result() for pid in pids)}) == 4


@pytest.mark.parametrize(
    ("call", "says"),
    [((divmod, 1, 0), "code 1: ZeroDivisionError"), ((os._exit, 9), "code 9: it said nothing")],
    ids=["raises", "dies"],
)
def test_a_call_that_fails_says_why_and_the_others_answer(call: tuple[Any, ...], says: str) -> None:
    with Processes(1) as processes:
        wrong, right = processes.submit(*call), processes.submit(divmod, 7, 3)
        with pytest.raises(SolverError, match=says):
            wrong.result()
        assert right.result() == (2, 1)


def _sleep_for_ever(begun: Path) -> None:
    begun.touch()
    while True:
        time.sleep(60)


def test_nothing_runs_on_after_the_end(tmp_path: Path) -> None:
    """A call that runs is ended, and not waited for."""
    with Processes(1) as processes:
        running, waiting = (processes.submit(_sleep_for_ever, tmp_path / name) for name in ("first", "second"))
        while not (tmp_path / "first").exists():
            time.sleep(0.01)
    assert not (tmp_path / "second").exists()
    with pytest.raises(SolverError, match="ended with code"):
        running.result()
    with pytest.raises((CancelledError, SolverError)):
        waiting.result()


def test_what_travels_and_what_cannot_be_sent() -> None:
    """Output that a call prints does not spoil its answer."""
    problem = Problem.from_dag([[], [0]], seconds=[1, 2], sizes=[4, 8])
    with Processes(1) as processes:
        assert processes.submit(repr, problem).result() == repr(problem)
        assert processes.submit(print, "noise").result() is None
        with pytest.raises((AttributeError, TypeError, PicklingError), match=r"pickle|local"):
            processes.submit(lambda: 1).result()


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom checkmate.solvers.common.processes import Processes\n"
        "print('once')\nwith Processes(2) as p:\n    print(p.submit(divmod, 7, 3).result())\n"
    )
    run = subprocess.run([sys.executable, str(script), str(ROOT)], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["once", "(2, 1)"]


def _priority(tell: object) -> None:
    assert callable(tell)
    tell((os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)))


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("call", "result", "logged"),
    [((math.factorial, 20), math.factorial(20), ""), slow((math.sqrt, -1.0), None, "math domain error")],
    ids=["answers", "fails"],
)
def test_a_call_aside_has_its_result_at_some_time_or_none(
    caplog: pytest.LogCaptureFixture, call: tuple[Any, ...], result: int | None, logged: str
) -> None:
    with caplog.at_level("INFO", "checkmate.solve"):
        aside = BackgroundCall(*call)
        assert aside.wait(60)
    assert (aside.is_over, aside.result) == (True, result)
    assert logged in caplog.text


def test_a_process_tells_and_is_gone_at_the_end_and_one_that_ends_says_why() -> None:
    with Process(_priority) as process:
        pid, niceness = next(process.answers())
        assert pid == process.pid
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert not _is_there(pid)
    with Process(os._exit, 7) as process, pytest.raises(SolverError, match="code 1: TypeError"):
        next(process.answers())  # one argument too many


@pytest.mark.wall_clock
def test_nobody_waits_any_more() -> None:
    aside = BackgroundCall(time.sleep, 600)
    held = aside._held
    while held.process is None:
        time.sleep(0.01)
    pid = held.process.pid
    del aside
    gc.collect()
    assert held.over.wait(60)
    assert not _is_there(pid)
