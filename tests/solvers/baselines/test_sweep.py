"""Many settings, and the cheapest that fits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.solvers.baselines.sweep import Sweep, cheapest, does_not_apply
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import kept_by_the_forward, peak_of
from checkmate.solvers.common.task import Clock, Task

CHAIN = dags.unit_chain(40)
BUDGET = 25


def runs(setting: int) -> np.ndarray:
    """Keep the last values of the forward, as many as the setting says: more is cheaper and takes more memory."""
    return kept_by_the_forward(CHAIN, range(41 - setting, 41))


def outcome(setting: int) -> tuple[float, int]:
    return float(runs(setting).sum()), peak_of(CHAIN, runs(setting))


def swept(
    runs: Callable[[int], np.ndarray] = runs, *, tries: int, budget: int = BUDGET, seconds: float = 60.0
) -> Sweep:
    task = Task(CHAIN, budget, Clock(seconds))
    return cheapest(task, Incumbent(task), "mine", 42, runs, tries=tries)


FITS = [setting for setting in range(42) if outcome(setting)[1] <= BUDGET]
BEST = min(FITS, key=lambda setting: outcome(setting)[0])


def test_all_settings_where_the_tries_suffice() -> None:
    sweep = swept(tries=42)
    best = sweep.incumbent
    assert FITS
    assert (sweep.tried, best.cost) == (42, outcome(BEST)[0])
    assert sweep.best in FITS
    assert best.R is not None
    assert peak_of(CHAIN, best.R) <= BUDGET


@pytest.mark.parametrize("tries", [16, 24, 32])
def test_with_fewer_tries_those_beside_the_best(tries: int) -> None:
    sweep = swept(tries=tries)
    assert (sweep.tried, sweep.incumbent.cost) == (tries, outcome(BEST)[0])


def test_no_setting_twice_and_all_of_them_in_the_end() -> None:
    asked: list[int] = []

    def asking(setting: int) -> np.ndarray:
        asked.append(setting)
        return runs(setting)

    swept(asking, tries=41)
    assert len(asked) == len(set(asked)) == 41


def test_without_time_one_setting_is_tried() -> None:
    assert swept(tries=42, seconds=0.0).tried == 1


def test_without_a_plan_the_smallest_peak_of_all() -> None:
    least = min(outcome(setting)[1] for setting in range(42))
    sweep = swept(tries=42, budget=least - 1)
    remarks = sweep.remarks({"a": 1}, remedy="; ask another")
    assert remarks.details == {"a": 1, "tried": 42, "peak": least}
    assert remarks.message == f"the smallest peak it reaches is {least} B; ask another"


def test_with_a_plan_there_is_no_message() -> None:
    assert swept(tries=42).remarks({"a": 1}) == Remarks(details={"a": 1, "tried": 42})


def test_what_does_not_apply() -> None:
    branch = Problem.from_dag([[], [0], [0, 1], [2]], [1] * 4, [1] * 4)
    refused = does_not_apply(Task(branch, 4), "others")
    assert refused is not None
    assert refused.message == (
        "it is for chains, and this forward is none (what op0 makes is read by op1 and op2); others apply to any graph"
    )
    assert does_not_apply(Task(CHAIN, 4), "others") is None
