"""The task and its clock."""

from __future__ import annotations

import time

import pytest

from benchmarks.networks import dags
from checkmate.solvers.common.task import Clock, Task


class Seconds:
    """A clock on the wall that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    seconds = Seconds()
    monkeypatch.setattr(time, "perf_counter", seconds)
    return seconds


def test_a_clock_counts_from_when_it_was_made_to_its_limit(wall: Seconds) -> None:
    clock = Clock(10.0)
    assert (clock.elapsed, clock.left, clock.is_over) == (0.0, 10.0, False)
    wall.now += 4.0
    assert (clock.elapsed, clock.left, clock.is_over) == (4.0, 6.0, False)
    wall.now += 6.0
    assert (clock.elapsed, clock.left, clock.is_over) == (10.0, 0.0, True)
    wall.now += 1.0
    assert (clock.elapsed, clock.left, clock.is_over) == (11.0, 0.0, True)


def test_a_share_is_of_what_is_left_and_begins_now(wall: Seconds) -> None:
    clock = Clock(10.0)
    wall.now += 4.0
    part = clock.share(0.5)
    assert (part.limit, part.elapsed) == (3.0, 0.0)
    wall.now += 3.0
    assert (part.is_over, clock.is_over) == (True, False)


def test_without_a_limit_it_is_never_over(wall: Seconds) -> None:
    wall.now += 1e9
    assert (Clock().left, Clock().share(0.1).left, Clock().is_over) == (float("inf"), float("inf"), False)


def test_no_time_is_over_at_once(wall: Seconds) -> None:
    assert Clock(0.0).is_over
    assert Clock(-1.0).left == 0.0


def test_a_part_of_a_task_has_a_clock_of_its_own(wall: Seconds) -> None:
    task = Task(dags.unit_chain(3), 5, Clock(10.0), gap=0.1, threads=2, seed=7)
    wall.now += 4.0
    part = task.within(2.0, gap=0.05)
    assert (part.problem is task.problem, part.budget, part.threads, part.seed) == (True, 5, 2, 7)
    assert (part.gap, part.clock.left, task.gap, task.clock.left) == (0.05, 2.0, 0.1, 6.0)
