"""Running HiGHS: every way in which a run can end."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import highspy
import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.errors import SolverError
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import build
from checkmate.solvers.linear.highs import Result, SolveStatus
from checkmate.solvers.linear.model import NONE, Model
from tests.solvers.checks import by
from tests.support.processes import run_fresh_python
from tests.support.pulp_engine import broken
from tests.support.sampling import in_turn

milp = by("milp")


def knapsack(seed: int = 0, n: int = 12) -> Model:
    """Choose things of the least worth to reach a weight."""
    rng = np.random.default_rng(seed)
    model = Model()
    x = model.variables((n,), cost=rng.integers(5, 50, n), integer=True, name="take")
    weight = rng.integers(5, 50, n)
    model.constrain("reach", [(x[None, :], weight)], lower=float(weight.sum() // 2))
    return model


def by_hand(model: Model) -> float:

    points = (np.arange(2**model.columns)[:, None] >> np.arange(model.columns)) & 1  # all there are
    fits = (model.matrix() @ points.T >= model.row_lower[:, None]).all(axis=0)
    return float((points[fits] @ model.cost).min())


def chain(budget: int = 4) -> Model:
    """The model of a chain whose optimum takes 26 s within four bytes."""
    return build(dags.unit_chain(8), budget)[0]


@in_turn(seed=range(5))
def test_integers_are_solved_exactly_and_the_relaxation_bounds_from_below(seed: int) -> None:
    """HiGHS keeps one scheduler a process, and a run with another number of threads would end without a result.

    A start of all things is no answer, be it all that presolve leaves: HiGHS 1.16 gives the start there, with the
    optimum's objective.
    """
    model, relaxed = knapsack(seed), highs.run(knapsack(seed), relax=True)
    everything = [(np.arange(n), np.ones(n)) for n in (model.columns, model.columns - 1)]
    for options in (*({"threads": n} for n in (1, 2, 1)), *({"start": start} for start in everything)):
        result = highs.run(model, **options)
        assert result.outcome is relaxed.outcome is SolveStatus.OPTIMAL
        assert result.objective == pytest.approx(by_hand(model)) == pytest.approx(result.bound)
        assert model.cost @ result.x == pytest.approx(result.objective)
        assert broken(model, result.x) == []
    assert relaxed.bound <= by_hand(model) + 1e-9


@pytest.mark.parametrize("relax", [True, False])
def test_the_impossible_is_proven(relax: bool) -> None:
    model = knapsack()
    model.constrain("none", [(np.arange(12)[None, :], 1.0)], upper=1.0)
    assert highs.run(model, relax=relax) == Result(SolveStatus.INFEASIBLE, None, np.inf, np.inf)


def test_without_time_the_bound_is_still_true() -> None:
    model = knapsack()
    assert highs.run(model, time_limit=0.0).bound <= by_hand(model)
    problem = dags.vgg()
    model, _ = build(problem, int(0.7 * problem.keep_all_peak))
    result = highs.run(model, relax=True, time_limit=0.0)
    assert result.outcome is SolveStatus.STOPPED
    assert result.bound == pytest.approx(len(problem.graph.ops))  # each op once, in units of the mean cost


def test_what_highs_has_when_a_limit_of_its_own_stops_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on nodes, which ends it at the same place on every machine."""
    model, x = build(dags.unit_chain(8), 4, formulation="paper")
    known = milp(dags.unit_chain(8), 4).schedule
    set_option = highs._set

    def limited(solver: highspy.Highs, option: str, value: bool | int | float | str) -> None:
        set_option(solver, option, value)
        set_option(solver, "mip_max_nodes", 0)

    monkeypatch.setattr(highs, "_set", limited)
    there = x.R != NONE
    result = highs.run(model, start=(x.R[there], known.R[there].astype(float)))
    assert (result.outcome, round(result.objective), broken(model, result.x)) == (SolveStatus.STOPPED, 26, [])
    assert 17 <= result.bound + 1e-6 < 26


@pytest.mark.parametrize("budget", [4, 2])
@pytest.mark.parametrize("relax", [True, False])
def test_what_highs_has_no_time_for_it_does_not_prove(budget: int, relax: bool) -> None:
    """It says so even where nothing fits, which takes it a moment; 1.16 needs none where a row cannot hold."""
    model = chain(budget)
    for gain in (1.0, -1.0):
        model._cost = [gain * abs(cost) for cost in model._cost]
        result = highs.run(model, relax=relax, time_limit=0.0)
        allowed = [Result(SolveStatus.STOPPED, None, math.inf, highs.least_objective(model))]
        if budget == 2:
            allowed.append(Result(SolveStatus.INFEASIBLE, None, math.inf, math.inf))
        assert result in allowed


def test_unbounded_or_infeasible_is_a_proof_only_where_nothing_is_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(upper: float, cost: float) -> Model:
        model = Model()
        model.variables((1,), lower=0.0, upper=upper, cost=cost)
        return model

    says = highspy.HighsModelStatus.kUnboundedOrInfeasible
    for status in (highspy.Highs.getModelStatus, lambda solver: says):
        monkeypatch.setattr(highspy.Highs, "getModelStatus", status)
        with pytest.raises(SolverError, match="solves nothing"):
            highs.run(one(np.inf, -1.0))
    for model in (one(np.inf, 1.0), one(3.0, -1.0)):
        assert highs.run(model).outcome is SolveStatus.INFEASIBLE


def test_a_start_on_some_columns_is_completed_and_left_out_where_it_cannot_be() -> None:
    model, x = build(dags.unit_chain(8), 20)
    there = x.R != -1
    result = highs.run(model, start=(x.R[there], np.eye(17)[there]), time_limit=10)
    assert result.objective == pytest.approx(17)
    model = knapsack()
    columns = np.arange(model.columns - 1)
    result = highs.run(model, start=(columns, np.full(len(columns), 7.0)))  # beyond what any of them may be
    assert result.objective == pytest.approx(by_hand(model))


def test_highs_is_given_whole_starts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """To complete one it solves the model with these columns fixed, and gives its bounds as those of the model.

    So a step of GPT-2 with a second memory once had its first plan proven optimal, which others were faster than.
    """
    model, given, bounds, take = knapsack(), list[Any](), list[float](), highspy.Highs.setSolution
    monkeypatch.setattr(highspy.Highs, "setSolution", lambda solver, *args: given.append(args) or take(solver, *args))
    result = highs.run(model, start=(np.arange(3), np.ones(3)), on_bound=bounds.append)
    ((count, columns, values),) = given
    assert count == len(columns) == model.columns
    np.testing.assert_array_equal(values[:3], np.ones(3))
    rows = model.matrix() @ values
    assert (rows >= np.array(model.row_lower) - 1e-6).all()
    assert (rows <= np.array(model.row_upper) + 1e-6).all()
    assert max(bounds, default=0.0) <= by_hand(model) * (1 + 1e-9)
    assert result.objective == pytest.approx(by_hand(model))


def test_a_point_that_is_not_what_is_claimed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is given in place of what was found: the model is solved again without."""
    model, plain, seen = knapsack(), highs._result, []

    def once_wrong(*args: Any) -> Result:
        seen.append(plain(*args))
        wrong = {} if seen[1:] else {"x": np.ones(model.columns), "objective": float(model.cost.sum())}
        return replace(seen[-1], **wrong)

    monkeypatch.setattr(highs, "_result", once_wrong)
    assert highs.run(model, start=(np.arange(12), np.ones(12))).objective == pytest.approx(by_hand(model))
    assert len(seen) == 2


def test_incumbents_are_reported_in_falling_order_bounds_in_rising_and_end_at_the_result() -> None:
    model, costs, bounds = chain(), list[float](), list[float]()
    result = highs.run(model, on_incumbent=lambda x: costs.append(float(model.cost @ x)), on_bound=bounds.append)
    assert (costs, bounds) == (sorted(costs, reverse=True), sorted(bounds))
    assert costs[-1] == pytest.approx(result.objective)
    assert len(bounds) > 1
    assert bounds[-1] <= result.bound * (1 + 1e-9)


@pytest.mark.parametrize("callback", ["on_incumbent", "on_bound"])
@pytest.mark.parametrize(
    "error", [LookupError("a callback's own trouble"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_errors_of_callbacks_reach_the_caller(
    callback: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is no Exception, and in a thread of its own it would end as a traceback on standard error."""
    unheard = Mock()
    monkeypatch.setattr(threading, "excepthook", unheard)
    with pytest.raises(type(error)) as raised:
        highs.run(chain(), **{callback: Mock(side_effect=error)})
    assert raised.value is error
    unheard.assert_not_called()


def test_what_a_callback_raises_does_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS may be busy for seconds before it asks again whether to stop."""
    busy, going, start = threading.Event(), list[highs._Run](), highs._Run.__init__

    def run(solver: highspy.Highs) -> highspy.HighsStatus:
        going[0]._improve(SimpleNamespace(data_out=SimpleNamespace(mip_solution=[1.0])))
        busy.wait()
        return highspy.HighsStatus.kOk

    def keep(self: highs._Run, *args: Any) -> None:
        going.append(self)
        start(self, *args)

    monkeypatch.setattr(highs._Run, "__init__", keep)
    monkeypatch.setattr(highspy.Highs, "run", run)
    try:
        with pytest.raises(KeyboardInterrupt):
            highs.run(knapsack(), on_incumbent=Mock(side_effect=KeyboardInterrupt))
        assert not busy.is_set()
    finally:
        busy.set()


@pytest.mark.wall_clock
def test_a_run_that_does_not_end_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS looks at the clock only now and then: its presolve of a large model takes seconds beyond the limit."""
    at_last, model = threading.Event(), knapsack()
    monkeypatch.setattr(highspy.Highs, "run", lambda solver: at_last.wait())
    try:
        result = highs.run(model, time_limit=0.1)
        assert not at_last.is_set()
    finally:
        at_last.set()
    assert result == Result(SolveStatus.STOPPED, None, np.inf, highs.least_objective(model))


def test_a_crash_of_highs_is_a_solver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highspy.Highs, "run", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(SolverError, match="HiGHS failed: out of memory"):
        highs.run(knapsack())


def test_the_gap_is_a_gap_between_cost_and_bound_and_a_target_stops_the_search() -> None:
    """A model without integers has no gap."""
    model = chain()
    near, cheap = highs.run(model, gap=0.2), highs.run(model, target=1e9)
    assert (near.objective - near.bound) / near.objective <= 0.2 + 1e-9
    assert cheap.outcome in (SolveStatus.STOPPED, SolveStatus.OPTIMAL)
    assert cheap.bound <= 26 + 1e-6
    assert broken(model, near.x) == broken(model, cheap.x) == []
    model = Model()
    x = model.variables((2,), cost=[1.0, 2.0])
    model.constrain("cover", [(x[None, :], 1.0)], lower=1.5)
    result = highs.run(model)
    assert (result.objective, result.bound) == (pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize("suffix", [".lp", ".mps"])
def test_a_written_model_read_again_has_the_same_optimum(tmp_path: Path, suffix: str) -> None:
    model, path = knapsack(), tmp_path / f"knapsack{suffix}"
    highs.export(model, path)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.readModel(str(path))
    solver.run()
    assert solver.getInfo().objective_function_value == pytest.approx(by_hand(model))
    assert "take_3" in path.read_text()


def test_a_file_is_lp_or_mps(tmp_path: Path) -> None:
    for path, error, says in (("a.txt", ValueError, r"\.lp or \.mps"), ("nowhere/a.lp", OSError, "No such file")):
        with pytest.raises(error, match=says):
            highs.export(knapsack(), tmp_path / path)


SCRIPT = f"""
import sys
import numpy as np
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.model import Model

{getsource(knapsack)}
{getsource(by_hand)}
model = knapsack()
assert highs.run(model).objective == by_hand(model) >= highs.run(model, relax=True).objective
highs.export(model, sys.argv[1])
"""


def test_nothing_is_printed(tmp_path: Path) -> None:
    run = run_fresh_python("-c", SCRIPT, str(tmp_path / "model.lp"))
    assert (run.stdout, run.stderr) == ("", "")
