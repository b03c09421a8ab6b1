"""Seconds that a process computes, whatever a busy machine does beside it: the clock of tests, and of some figures."""

from __future__ import annotations

import time

import highspy

WALL = time.perf_counter
PATIENCE = 40.0  # times as long as asked for may HiGHS take on the wall: it is stopped once the seconds below are over


def count_own_seconds() -> None:
    """Count all limits and durations of this process in seconds that it computes, of all its threads together.

    So a limit stands for as much work on a busy machine as on an idle one, and what a test says of seconds holds there
    too. HiGHS has a clock of its own: its limit is set so late that ours ends it.
    """
    from checkmate.solvers.linear import highs

    if time.perf_counter is time.process_time:
        return
    time.perf_counter = time.process_time
    set_option = highs._set

    def patient(solver: highspy.Highs, option: str, value: bool | int | float | str) -> None:
        set_option(solver, option, PATIENCE * float(value) if option == "time_limit" else value)

    highs._set = patient
