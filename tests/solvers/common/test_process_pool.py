"""Calls elsewhere: answers, failures, and processes that die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from pickle import PicklingError

import pytest

from checkmate.core.problem import Problem
from checkmate.errors import SolverError
from checkmate.solvers.common.process_pool import Processes

ROOT = Path(__file__).parents[3]


def test_calls_run_elsewhere_and_answer() -> None:
    with Processes(2) as processes:
        pids = [processes.submit(os.getpid) for _ in range(3)]
        assert len({os.getpid(), *(pid.result() for pid in pids)}) == 4


def test_a_call_that_raises_says_what_and_the_others_answer() -> None:
    with Processes(1) as processes:
        wrong, right = processes.submit(divmod, 1, 0), processes.submit(divmod, 7, 3)
        with pytest.raises(SolverError, match=r"code 1: ZeroDivisionError"):
            wrong.result()
        assert right.result() == (2, 1)


def test_a_process_that_dies_takes_no_other_with_it() -> None:
    with Processes(1) as processes:
        dead, right = processes.submit(os._exit, 9), processes.submit(divmod, 7, 3)
        with pytest.raises(SolverError, match="code 9: it said nothing"):
            dead.result()
        assert right.result() == (2, 1)


def test_what_a_call_prints_does_not_spoil_its_answer() -> None:
    with Processes(1) as processes:
        assert processes.submit(print, "noise").result() is None


def _sleep_for_ever(begun: Path) -> None:
    begun.touch()
    while True:
        time.sleep(60)


def test_nothing_runs_on_after_the_end(tmp_path: Path) -> None:
    """What runs is ended, and not waited for."""
    with Processes(1) as processes:
        running, waiting = (processes.submit(_sleep_for_ever, tmp_path / name) for name in ("first", "second"))
        while not (tmp_path / "first").exists():
            time.sleep(0.01)
    assert not (tmp_path / "second").exists()
    with pytest.raises(SolverError, match="ended with code"):
        running.result()
    with pytest.raises((CancelledError, SolverError)):
        waiting.result()


def test_what_cannot_be_sent_is_an_error_of_its_call() -> None:
    with Processes(1) as processes, pytest.raises((AttributeError, TypeError, PicklingError), match=r"pickle|local"):
        processes.submit(lambda: 1).result()


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom checkmate.solvers.common.process_pool import Processes\n"
        "print('once')\nwith Processes(2) as p:\n    print(p.submit(divmod, 7, 3).result())\n"
    )
    run = subprocess.run([sys.executable, str(script), str(ROOT)], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["once", "(2, 1)"]


def test_a_problem_travels() -> None:
    problem = Problem.from_dag([[], [0]], seconds=[1, 2], sizes=[4, 8])
    with Processes(1) as processes:
        assert processes.submit(repr, problem).result() == repr(problem)
