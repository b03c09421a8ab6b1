"""CBC, through PuLP, solves the model that HiGHS solves."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pulp
import pytest

from benchmarks.networks import dags
from checkmate import Problem
from checkmate.errors import SolverError
from checkmate.solvers.linear.equations import FORMULATIONS, build, cost_unit, without_spare
from checkmate.solvers.linear.highs import Result, SolveStatus
from checkmate.solvers.linear.model import Model
from tests.support import pulp_engine
from tests.support.oracle import optima, random_problem
from tests.support.pulp_engine import broken
from tests.support.sampling import every, in_turn

has_cbc = bool({"COIN_CMD", "PULP_CBC_CMD"} & set(pulp.listSolvers(onlyAvailable=True)))
pytestmark = [
    pytest.mark.skipif(not has_cbc, reason="PuLP brings no CBC for this platform"),
    pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated"),  # COIN_CMD is taken where it is there
]


def _solved(problem: Problem, budget: int, formulation: str = "strengthened") -> tuple[float, Result]:
    """The least seconds by CBC, and all that it says."""
    model, _ = build(*without_spare(problem, budget), formulation=formulation)
    result = pulp_engine.run(model, "CBC")
    return result.objective * cost_unit(problem), result


@pytest.mark.slow
@in_turn(formulation=FORMULATIONS, seed=every(3, range(8)))
def test_cbc_equals_brute_force(seed: int, formulation: str) -> None:
    for budget, best in optima(problem := random_problem(seed))[-3:]:
        cost, result = _solved(problem, budget, formulation)
        assert cost == pytest.approx(best, rel=1e-6)
        assert result.outcome is (SolveStatus.INFEASIBLE if np.isinf(best) else SolveStatus.OPTIMAL)


def test_golden_chain_of_8() -> None:
    for budget, cost in ((5, 22), (6, 21), (8, 19)):
        assert _solved(dags.unit_chain(8), budget)[0] == pytest.approx(cost)
    with pytest.raises(SolverError, match="is no solver that PuLP knows"):
        pulp_engine.run(build(dags.unit_chain(2), 4)[0], "NOTHING")


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_the_impossible_is_proven_by_the_engine(formulation: str) -> None:
    model, _ = build(dags.unit_chain(4), 2, formulation=formulation)
    assert pulp_engine.run(model, "CBC").outcome is SolveStatus.INFEASIBLE


@pytest.mark.parametrize("time_limit", [0.0, 0.006, 0.03])
def test_without_time_nothing_false_is_said(time_limit: float) -> None:
    model, _ = build(dags.unit_chain(8), 4)
    result = pulp_engine.run(model, "CBC", time_limit=time_limit)
    assert result.outcome is not SolveStatus.INFEASIBLE
    assert result.bound <= 26 + 1e-6
    assert result.x is None or broken(model, result.x) == []


# What CBC writes first, what that proves in time (nothing when the time is up), and whether there is a point. The last
# two are what it wrote of a model that has a solution when its preprocessing ran out of time, and of one that has none:
# only the clock tells which.
SAYS = {
    "Optimal - objective value 3": ("OPTIMAL", True),
    "Stopped on time - objective value 3": ("STOPPED", True),
    "Stopped on time (no integer solution - continuous used) - objective value 1": ("STOPPED", False),
    "Infeasible - objective value 1": ("INFEASIBLE", False),
    "Integer infeasible - objective value 1": ("INFEASIBLE", False),
}


@pytest.mark.skipif(os.name == "nt", reason="CBC is played by a shell script")
@pytest.mark.parametrize("words", SAYS)
@pytest.mark.parametrize("in_time", [True, False])
def test_what_cbc_says_counts_as_proof_only_before_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, in_time: bool
) -> None:
    script, value = tmp_path / "cbc", 3 if SAYS[words][1] else 0.5
    script.write_text(f"#!/bin/sh\nfor last; do :; done\nprintf '{words}\\n0 X0000000 {value} 1\\n' > $last\n")
    script.chmod(0o755)
    monkeypatch.setattr(pulp_engine, "_solver", lambda *args: pulp.COIN_CMD(path=str(script), msg=False))
    model = Model()
    x = model.variables((1,), upper=9.0, cost=1.0, integer=True)
    model.constrain("enough", [(x[None, :], 1.0)], lower=1.0)
    result = pulp_engine.run(model, "CBC", time_limit=1e9 if in_time else 0.0)
    outcome = SolveStatus[SAYS[words][0]] if in_time else SolveStatus.STOPPED
    bound = {SolveStatus.OPTIMAL: 3.0, SolveStatus.STOPPED: 0.0, SolveStatus.INFEASIBLE: float("inf")}[outcome]
    assert (result.outcome, result.bound) == (outcome, bound)
    assert result.x is None or (SAYS[words][1] and result.x.tolist() == [3])


def test_bounds_of_all_kinds_and_both_sides_of_rows_are_passed_on() -> None:
    model = Model()
    x = model.variables((2,), lower=-3.0, upper=np.inf, cost=[1.0, 1.0])
    y = model.variables((1,), lower=2.0, upper=2.0, cost=1.0, integer=True)
    model.variables((1,), lower=0.0, upper=7.0, cost=-1.0, integer=True)
    model.constrain("at least", [(np.array([[x[0], x[1], y[0]]]), 1.0)], lower=1.5)
    assert pulp_engine.run(model, "CBC").objective == pytest.approx(1.5 - 7)
    for sign, expected in ((1.0, 0.5), (-1.0, -1.5)):
        model = Model()
        x = model.variables((2,), cost=sign)
        model.constrain("between", [(x[None, :], 1.0)], lower=0.5, upper=1.5)
        assert pulp_engine.run(model, "CBC").objective == pytest.approx(expected)
