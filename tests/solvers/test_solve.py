"""The front door: names, budgets, refusals, the portfolio, and the time it takes."""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Refusal, Solution, Status
from checkmate.errors import BudgetError, SolverError
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.highs import Result, SolveStatus
from checkmate.solvers.linear.model import Model
from checkmate.solvers.search.min_budget import least_runs
from checkmate.solvers.solve import min_budget, solve
from checkmate.units import exact_bytes
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem
from tests.support.sampling import every, in_turn, long, slow

checkpoint_all = METHODS["checkpoint-all"].solve
WITHOUT_HOST = [name for name, method in METHODS.items() if not method.needs_host]

STEPS = {"vgg": dags.vgg(8), "resnet": dags.resnet((1, 1, 1, 1)), "unet": dags.unet(2), "gpt": dags.gpt(2)}


def check(solution: Solution) -> None:
    """The plan verifies and the figures belong to it."""
    assert solution.plan is not None
    assert simulator.check_plan(solution.plan, solution.problem, solution.budget) == []
    assert solution.cost == pytest.approx(simulator.cost(solution.plan, solution.problem))
    assert solution.bound <= solution.cost
    assert solution.seconds > 0


@pytest.mark.parametrize("block", every(8, range(8)))
def test_auto_finds_and_proves_the_optimum_of_small_problems(block: int) -> None:
    for seed in range(15 * block, 15 * block + 15):
        problem = random_problem(seed, most_ops=5 if seed % 3 == 0 else 4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best = optimum(known, budget)
            solution = solve(problem, max(1, budget), gap=0.0)
            if math.isinf(best):
                assert solution.status is Status.INFEASIBLE
                assert solution.refusal.min_budget == budget + 1
            else:
                check(solution)
                assert solution.cost == pytest.approx(best)
                assert solution.bound == pytest.approx(best)


WHATEVER_THE_BUDGET = {"last-node": 26.0, "chen-sqrt": 14.0, "ap-sqrt": 14.0, "linearized-sqrt": 14.0}  # seconds


@pytest.mark.parametrize("method", WITHOUT_HOST)
def test_every_method_answers_to_its_name(method: str) -> None:
    problem = dags.unit_chain(5)
    solution = solve(problem, 9, method=method, time_limit=20)
    check(solution)
    assert solution.cost == WHATEVER_THE_BUDGET.get(method, 11.0)  # 11 where nothing runs twice
    assert solution.method in (method, "checkpoint-all")


@in_turn(method=WITHOUT_HOST, seed=[*range(0, 30, 6), *map(long, range(3, 30, 6))])
def test_every_method_is_verified_and_never_below_the_optimum(method: str, seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    known = outcomes(problem)
    for budget in interesting_budgets(known):
        solution = solve(problem, max(1, budget), method=method)
        assert solution.cost >= optimum(known, budget) - 1e-6
        assert solution.bound <= optimum(known, budget) + 1e-6
        if solution.plan is not None:
            check(solution)


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no method 'magic'.*auto, checkpoint-all"):
        solve(dags.unit_chain(3), 5, method="magic")


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_option_is_refused_with_the_known_ones(method: str) -> None:
    options = ", ".join(METHODS[method].options) or "none"
    with pytest.raises(ValueError, match=re.escape(f"{method!r} has no option 'foo'. Its options are {options}.")):
        solve(dags.unit_chain(3), 5, method=method, foo=1)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "10", None, True])
def test_a_time_limit_out_of_range_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"time_limit is a .*number"):
        solve(dags.unit_chain(3), 5, time_limit=limit)


@pytest.mark.parametrize("gap", [-1e-9, 1.1, float("nan"), float("inf"), "1%", None, True])
def test_a_gap_out_of_range_is_refused(gap: Any) -> None:
    with pytest.raises(ValueError, match=r"gap is a (share|number)"):
        solve(dags.unit_chain(3), 5, gap=gap)


@pytest.mark.parametrize("budget", ["5 B", 5, 5.0, np.int64(5), "0.005 kB"])
def test_budgets_as_people_write_them(budget: int | float | str) -> None:
    assert solve(dags.unit_chain(3), budget).budget == 5


@pytest.mark.parametrize("budget", [0, -1, 0.5, "much", "5 GBB", float("nan"), float("inf"), True])
def test_budgets_that_are_none(budget: float | str) -> None:
    with pytest.raises(BudgetError):
        solve(dags.unit_chain(3), budget)


def test_a_budget_that_keeps_everything_is_met_at_once_and_optimal() -> None:
    for problem in STEPS.values():
        solution = solve(problem, problem.keep_all_peak)
        assert solution.status is Status.OPTIMAL
        assert solution.gap == 0.0
        assert solution.cost == pytest.approx(problem.keep_all_cost)
        assert solution.peak == problem.keep_all_peak


def test_checkpoint_all_finds_nothing_below_its_peak() -> None:
    problem = STEPS["vgg"]
    assert checkpoint_all(problem, problem.keep_all_peak - 1).status is Status.NOT_FOUND
    below = solve(problem, problem.keep_all_peak - 1, method="checkpoint-all")
    assert below.status is Status.NOT_FOUND
    assert "'auto'" in below.message


def test_a_method_without_a_plan_says_why() -> None:
    problem = STEPS["resnet"]
    solution = solve(problem, problem.keep_all_peak, method="chen-sqrt")
    assert solution.status is Status.NOT_FOUND
    assert "this forward is none (what pool_4 makes is read by conv_5 and add_10)" in solution.message
    assert "'auto'" in solution.message


@pytest.mark.parametrize("name", every(4, STEPS))
def test_a_refusal_names_the_op_and_a_budget_that_works(name: str) -> None:
    problem = STEPS[name]
    floor = int(problem.unavoidable_bytes.max())
    refused = solve(problem, floor - 1)
    assert refused.status is Status.INFEASIBLE
    assert refused.plan is None
    assert refused.gap == math.inf
    op = problem.graph.ops[int(problem.unavoidable_bytes.argmax())].name
    least = refused.refusal.min_budget
    assert refused.refusal.op == op
    assert op in refused.message
    assert exact_bytes(least) in refused.message
    assert least == min_budget(problem).peak == checkmate.min_budget(problem).peak >= floor
    accepted = solve(problem, least, time_limit=5)
    check(accepted)
    assert accepted.peak == least or (accepted.peak is not None and accepted.peak <= least)


def test_a_refusal_says_where_the_smallest_budget_is_slow_and_names_a_roomier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = dags.unit_chain(16)
    least, R = least_runs(problem)
    times = R.sum() / problem.keep_all_cost
    slow = f"There a step takes {times:.1f} times as long"
    assert solve(problem, least - 1).message.endswith(f"{slow}.")
    monkeypatch.setattr("checkmate.solvers.solve.ROOM", 2.0)
    assert re.search(rf"{slow}; with 6 B, 1\.\d times\.$", solve(problem, least - 1).message)
    assert "as long" not in solve(dags.unit_chain(2), 2).message


def test_a_refusal_names_the_line_of_the_users_code() -> None:
    ops = (Op("load", "f", (), (0,)), Op("mix", "f", (0,), (1,), where="model.py:12 in forward"))
    graph = Graph(ops, (Value("x", 10, 0), Value("y", 10, 1)), (1,))
    problem = Problem(graph, Profile(np.ones(2), np.zeros(2)))
    assert "mix (model.py:12 in forward) alone needs 20 B" in solve(problem, 19).message


def test_what_is_proven_to_have_no_schedule_is_refused_as_such() -> None:
    problem = random_problem(52)
    budget = interesting_budgets(outcomes(problem))[-1]  # the highest that no schedule meets
    assert budget >= problem.unavoidable_bytes.max()  # of which no single op tells
    solution = solve(problem, budget)
    assert solution.status is Status.INFEASIBLE
    assert solution.refusal.min_budget == budget + 1


def test_cost_and_bound_never_rise_with_the_budget() -> None:
    for seed in range(500, 520):
        problem = random_problem(seed, most_ops=7)
        low = min_budget(problem).peak
        budgets = np.unique(np.linspace(max(1, low), problem.keep_all_peak, 8).astype(int))
        costs = [solve(problem, int(budget), gap=0.0).cost for budget in budgets]
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(costs))


@pytest.mark.parametrize("name", STEPS)
def test_the_gap_asked_for_is_reached_on_training_steps(name: str) -> None:
    problem = STEPS[name]
    floor = int(problem.unavoidable_bytes.max())
    budget = (2 * floor + 3 * problem.keep_all_peak) // 5
    solution = solve(problem, budget, time_limit=20, gap=0.01)
    check(solution)
    assert solution.gap <= 0.01


def test_it_stops_at_the_gap_asked_for() -> None:
    problem = STEPS["gpt"]
    solution = solve(problem, int(0.7 * problem.keep_all_peak), gap=0.5)
    assert solution.seconds < 5
    assert list(solution.details["found"]) == ["next-use"]


def test_the_time_limit_holds() -> None:
    problem = dags.resnet((3, 4, 6, 3))
    budget = int(0.6 * problem.keep_all_peak)
    began = time.perf_counter()
    solution = solve(problem, budget, time_limit=1.5, gap=0.0)
    taken = time.perf_counter() - began
    check(solution)
    assert taken < 3.0
    assert solution.seconds == pytest.approx(taken, abs=0.2)


@pytest.mark.long
def test_the_same_seed_gives_the_same_answer() -> None:
    problem = STEPS["unet"]
    budget = int(0.8 * problem.keep_all_peak)
    first, second = (solve(problem, budget, seed=1) for _ in range(2))
    assert first.schedule is not None
    assert second.schedule is not None
    assert np.array_equal(first.schedule.R, second.schedule.R)


@pytest.mark.parametrize("method", ["auto", "next-use", "milp", "lp-rounding"])
def test_the_same_seed_gives_the_same_plan_where_time_does_not_bind(method: str) -> None:
    problem = dags.unit_chain(7)
    seeded = {"seed": 3} if "seed" in METHODS[method].options else {}
    first, second = (solve(problem, 5, method=method, time_limit=100, **seeded) for _ in range(2))
    assert first.plan == second.plan is not None
    assert first.bound == second.bound
    assert first.seconds + second.seconds < 60  # so the limit did not bind


def test_progress_is_logged_and_nothing_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="checkmate.solve"):
        solve(STEPS["gpt"], int(0.7 * STEPS["gpt"].keep_all_peak), time_limit=5)
    assert any("next-use" in record.getMessage() for record in caplog.records)
    assert capfd.readouterr() == ("", "")


# A solver that fails, answers rubbish or runs out of time.


def _fails(model: Model, **options: Any) -> Result:
    raise SolverError("HiGHS failed to run.")


def _runs_out_of_time(model: Model, **options: Any) -> Result:
    return Result(SolveStatus.STOPPED, None, math.inf, highs.least_objective(model))


def _answers(value: float | None, outcome: SolveStatus, bound: float) -> Callable[..., Result]:
    """Every variable has one value; None: noise."""

    def run(model: Model, **options: Any) -> Result:
        x = np.random.default_rng(0).random(model.columns) if value is None else np.full(model.columns, value)
        return Result(outcome, x, 0.0, bound)

    return run


RUBBISH = {
    "fails": _fails,
    "runs out of time": _runs_out_of_time,
    "zeros": _answers(0.0, SolveStatus.OPTIMAL, 0.0),
    "ones": _answers(1.0, SolveStatus.OPTIMAL, 0.0),
    "huge": _answers(1e300, SolveStatus.OPTIMAL, 1e300),
    "nan": _answers(math.nan, SolveStatus.STOPPED, math.nan),
    "noise": _answers(None, SolveStatus.OPTIMAL, -math.inf),
    "a bound too high": _answers(1.0, SolveStatus.STOPPED, 1e9),
}


@pytest.mark.parametrize("method", [slow("auto"), "milp", "lp-rounding"])
@pytest.mark.parametrize("name", RUBBISH)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_what_a_solver_gets_wrong_never_becomes_a_plan(monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    monkeypatch.setattr(highs, "run", RUBBISH[name])
    problem = dags.unit_chain(8)
    solution = solve(problem, 6, method=method, time_limit=5)  # its optimum takes 21 s
    if solution.plan is None:
        assert method != "auto"
        assert solution.status is Status.NOT_FOUND
        assert f"{method} f" in solution.message  # found nothing, or failed
        assert solution.refusal.min_budget <= 6
    else:
        check(solution)
        assert solution.cost >= 21
        assert solution.status is Status.FEASIBLE or solution.cost == 21
    if method == "auto":
        assert solution.cost <= 22  # by next use


@pytest.mark.slow
def test_auto_keeps_its_plan_where_a_stage_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(highs, "run", _fails)
    solution = solve(dags.unit_chain(30), 8, time_limit=1)
    assert solution.status is Status.FEASIBLE
    assert "HiGHS failed to run." in solution.details["failed"]
    assert any("HiGHS failed to run." in record.getMessage() for record in caplog.records)


def test_a_failure_without_a_plan_is_told() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(highs, "run", _fails)
        solution = solve(dags.unit_chain(8), 6, method="milp")
    assert solution.status is Status.NOT_FOUND
    assert solution.message.startswith("milp failed: HiGHS failed to run. milp found no schedule within 6 B")


def test_a_plan_that_was_reported_survives_the_failure_of_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    run = highs.run

    def fail_late(model: Model, **options: Any) -> Result:
        run(model, **options)
        raise SolverError("lost the result")

    monkeypatch.setattr(highs, "run", fail_late)
    solution = solve(dags.unit_chain(8), 6, method="milp")
    check(solution)
    assert solution.cost == 21
    assert solution.details["failed"] == ["lost the result"]


def test_one_op_is_a_problem_too() -> None:
    problem = Problem.from_dag([[]], seconds=[1.0], sizes=[4])
    assert solve(problem, 4).cost == 1.0
    assert solve(problem, 3).refusal == Refusal(4, "op0", "op0 alone needs 4 B")


def test_a_step_of_no_time_and_no_bytes() -> None:
    problem = Problem.from_dag([[], [0], [0, 1]], seconds=[0.0] * 3, sizes=[0] * 3)
    assert solve(problem, 1).gap == 0.0
    assert min_budget(problem).peak == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share", "gap"), [("vgg", 0.6, 1e-3), ("mobilenet", 0.5, 1e-3), ("gpt", 0.5, 1e-3)])
def test_the_full_size_steps_are_closed(name: str, share: float, gap: float) -> None:
    problem = dags.SHAPES[name]()
    solution = solve(problem, int(share * problem.keep_all_peak), time_limit=60, gap=gap)
    check(solution)
    assert solution.gap <= gap
