"""The stages of `auto`, each of which can be left out."""

from __future__ import annotations

import pytest

from benchmarks.networks import dags
from checkmate.core.solution import Status
from checkmate.solvers.auto import STAGES
from checkmate.solvers.catalogue import METHODS

auto = METHODS["auto"].solve

CHAIN = dags.unit_chain(8)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_without_a_stage_what_is_found_still_holds(stage: object) -> None:
    optimum = auto(CHAIN, 5, time_limit=5)
    assert optimum.status is Status.OPTIMAL
    solution = auto(CHAIN, 5, time_limit=5, without=[stage.name])
    assert solution.cost >= optimum.cost
    assert solution.bound <= optimum.cost * (1 + 1e-9)
    assert solution.peak <= 5


def test_without_all_stages_nothing_is_found() -> None:
    solution = auto(CHAIN, 5, without=[stage.name for stage in STAGES])
    assert (solution.status, solution.plan) == (Status.NOT_FOUND, None)


def test_a_stage_that_there_is_none_of() -> None:
    with pytest.raises(ValueError, match="no stage 'magic'; its stages are known, next-use"):
        auto(CHAIN, 5, without=["magic"])
