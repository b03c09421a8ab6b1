"""The task and its clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from benchmarks.networks import dags
from checkmate.solvers.common.incumbent import Clock, Task


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock on the wall that is set by hand."""
    seconds = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds.now)
    return seconds


def test_a_clock_counts_from_when_it_was_made_to_its_limit(wall: SimpleNamespace) -> None:
    clock, told = Clock(10.0), []
    for seconds in (0, 4, 6, 1):
        wall.now += seconds
        told.append((clock.elapsed, clock.left, clock.is_over))
    assert told == [(0.0, 10.0, False), (4.0, 6.0, False), (10.0, 0.0, True), (11.0, 0.0, True)]


def test_a_share_is_of_what_is_left_and_a_part_has_a_clock_of_its_own(wall: SimpleNamespace) -> None:
    task = Task(dags.unit_chain(3), 5, Clock(10.0), gap=0.1, threads=2, seed=7)
    wall.now += 4.0
    share, part = task.clock.share(0.5), task.within(2.0, gap=0.05)
    assert (share.seconds, share.elapsed) == (3.0, 0.0)
    assert (part.problem is task.problem, part.budget, part.threads, part.seed) == (True, 5, 2, 7)
    assert (part.gap, part.clock.left, task.gap, task.clock.left) == (0.05, 2.0, 0.1, 6.0)
    wall.now += 3.0
    assert (share.is_over, task.clock.is_over) == (True, False)


def test_without_a_limit_it_is_never_over_and_with_no_time_at_once(wall: SimpleNamespace) -> None:
    wall.now += 1e9
    assert (Clock().left, Clock().share(0.1).left, Clock().is_over) == (float("inf"), float("inf"), False)
    assert (Clock(0.0).is_over, Clock(-1.0).left) == (True, 0.0)
