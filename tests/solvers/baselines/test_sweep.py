"""Many settings, and the cheapest that fits."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.solution import Status
from checkmate.solvers.baselines.sweep import answer, cheapest, does_not_apply
from checkmate.solvers.common.runs import kept_by_the_forward, peak_of

CHAIN = dags.unit_chain(40)
BUDGET = 25


def runs(setting: int) -> np.ndarray:
    """Keep the last values of the forward, as many as the setting says: more is cheaper and takes more memory."""
    return kept_by_the_forward(CHAIN, range(41 - setting, 41))


def outcome(setting: int) -> tuple[float, int]:
    return float(runs(setting).sum()), peak_of(CHAIN, runs(setting))


FITS = [setting for setting in range(42) if outcome(setting)[1] <= BUDGET]
BEST = min(FITS, key=lambda setting: outcome(setting)[0])


def test_all_settings_where_the_tries_suffice() -> None:
    sweep = cheapest(CHAIN, BUDGET, 42, runs, tries=42)
    assert FITS
    assert (sweep.tried, sweep.cost) == (42, outcome(BEST)[0])
    assert sweep.best in FITS
    assert sweep.R is not None
    assert peak_of(CHAIN, sweep.R) <= BUDGET


@pytest.mark.parametrize("tries", [16, 24, 32])
def test_with_fewer_tries_those_beside_the_best(tries: int) -> None:
    sweep = cheapest(CHAIN, BUDGET, 42, runs, tries=tries)
    assert (sweep.tried, sweep.cost) == (tries, outcome(BEST)[0])


def test_no_setting_twice_and_all_of_them_in_the_end() -> None:
    asked: list[int] = []

    def asking(setting: int) -> np.ndarray:
        asked.append(setting)
        return runs(setting)

    cheapest(CHAIN, BUDGET, 42, asking, tries=41)
    assert len(asked) == len(set(asked)) == 41


def test_without_time_one_setting_is_tried() -> None:
    assert cheapest(CHAIN, BUDGET, 42, runs, tries=42, time_limit=0.0).tried == 1


def test_without_a_plan_the_smallest_peak_of_all() -> None:
    least = min(outcome(setting)[1] for setting in range(42))
    sweep = cheapest(CHAIN, least - 1, 42, runs, tries=42)
    solution = answer(sweep, "mine", 0.0, details={"a": 1}, remedy="; ask another")
    assert (solution.status, solution.method) == (Status.NOT_FOUND, "mine")
    assert solution.details == {"a": 1, "tried": 42, "peak": least}
    assert solution.message == f"the smallest peak it reaches is {least} B; ask another"


def test_the_answer_is_certified() -> None:
    solution = answer(cheapest(CHAIN, BUDGET, 42, runs, tries=42), "mine", 0.0, details={})
    assert solution.plan is not None
    assert solution.peak is not None
    assert solution.peak <= BUDGET
    assert solution.cost == outcome(BEST)[0]
    assert solution.bound == CHAIN.keep_all_cost


def test_what_does_not_apply() -> None:
    branch = Problem.from_dag([[], [0], [0, 1], [2]], [1] * 4, [1] * 4)
    refused = does_not_apply(branch, 4, "mine", 0.0, "others")
    assert refused is not None
    assert (refused.status, refused.method, refused.plan) == (Status.NOT_FOUND, "mine", None)
    assert refused.message == (
        "it is for chains, and this forward is none (what op0 makes is read by op1 and op2); others apply to any graph"
    )
    assert does_not_apply(CHAIN, 4, "mine", 0.0, "others") is None
