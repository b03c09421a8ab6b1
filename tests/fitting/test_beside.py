"""A call in a copy of this process gives what it would give here, and where the copy fails, it is made here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from checkmate.fitting.beside import Beside
from tests.support.processes import run_python

TWO_PROCESSORS = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two processors"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no copy has failed."""
    monkeypatch.setattr(Beside, "_may_work", True)


@TWO_PROCESSORS
def test_it_runs_in_another_process() -> None:
    with Beside(os.getpid) as other:
        assert other.result(patience=60) != os.getpid()


def _fails() -> None:
    raise RuntimeError("no such thing")


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _takes_long() -> None:
    time.sleep(600)


@pytest.mark.parametrize("there", [_fails, _is_killed, _takes_long, lambda: lambda: None])
def test_what_fails_there_is_done_here(there: Callable[[], Any]) -> None:
    own = os.getpid()

    def call() -> Any:
        return "here" if os.getpid() == own else there()

    with Beside(call) as other:
        assert other.result(patience=1 if there is _takes_long else 60) == "here"
    with Beside(os.getpid) as another:
        assert another.result(patience=60) == own


def test_an_error_is_seen_here() -> None:
    with Beside(_fails) as other, pytest.raises(RuntimeError, match="no such thing"):
        other.result(patience=60)


def test_it_ends_with_the_block() -> None:
    with Beside(_takes_long) as other:
        process = other._copy
    assert process is None or not process.is_alive()


def test_with_one_processor_there_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    with Beside(os.getpid) as other:
        assert other.result(patience=60) == os.getpid()


def _tells_where(pipe: Connection) -> None:
    with Beside(os.getpid) as other:
        pipe.send(other.result(patience=60))


@TWO_PROCESSORS
def test_within_a_worker_of_a_data_loader_there_is_no_copy() -> None:
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe(duplex=False)
    worker = context.Process(target=_tells_where, args=(end,), daemon=True)
    worker.start()
    assert pipe.recv() == worker.pid
    worker.join()


def test_nothing_is_said_there(capfd: pytest.CaptureFixture[str]) -> None:
    own = os.getpid()

    def call() -> None:
        if os.getpid() != own:
            sys.stderr.write("aloud")
            os.write(1, b"aloud")

    with Beside(call) as other:
        other.result(patience=60)
    assert capfd.readouterr() == ("", "")


_BOTH = """
import sys
import torch
from torch.nn.functional import mse_loss
import checkmate
from checkmate.fitting.beside import Beside

with torch.device("meta"):
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(64, 64)] * 3), (torch.ones(8, 64), torch.ones(8, 64))
found = []
for may_work in (True, False):
    Beside._may_work = may_work
    page = checkmate.fits(lambda x, y: mse_loss(model(x), y), *batch, device="rtx4090", budget="1 MB", time_limit=60)
    found.append((page.largest.plain, page.largest.keep_all, page.largest.planned))
    sys.stdout.write(f"{Beside._may_work} ")
sys.stdout.write(f"{found[0] == found[1]} {min(found[0]) > 8}")
"""


@pytest.mark.slow
@TWO_PROCESSORS
def test_the_largest_batch_is_the_same_with_a_trace_made_there() -> None:
    assert run_python("-c", _BOTH).stdout == "True False True True"
