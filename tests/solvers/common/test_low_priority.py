"""What works beside the training has a low priority, and is gone with whoever waits for it."""

from __future__ import annotations

import gc
import math
import os
import time

import pytest

from checkmate.solvers.common.low_priority import NICENESS, Aside, Gone, Process


def _priority(tell: object) -> None:
    assert callable(tell)
    tell((os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)))


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_call_aside_has_its_result_at_some_time() -> None:
    aside = Aside(math.factorial, 20)
    assert aside.wait(60)
    assert aside.is_over
    assert aside.result == 2432902008176640000


@pytest.mark.slow
def test_a_call_that_fails_has_no_result(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "checkmate.solve"):
        aside = Aside(math.sqrt, -1.0)
        assert aside.wait(60)
    assert aside.result is None
    assert "math domain error" in caplog.text


def test_a_process_tells_and_is_gone_at_the_end() -> None:
    with Process(_priority) as process:
        pid, niceness = next(process.answers())
        assert pid == process.pid
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert not _is_there(pid)


def test_a_process_that_ends_says_why() -> None:
    with Process(os._exit, 7) as process, pytest.raises(Gone, match="code 1: TypeError"):  # one argument too many
        next(process.answers())


@pytest.mark.wall_clock
def test_nobody_waits_any_more() -> None:
    aside = Aside(time.sleep, 600)
    held = aside._held
    while held.process is None:
        time.sleep(0.01)
    pid = held.process.pid
    del aside
    gc.collect()
    assert held.over.wait(60)
    assert not _is_there(pid)
