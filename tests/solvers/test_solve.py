"""The front door: names, budgets, refusals, the portfolio, the time it takes, and the cheapest split of a step."""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate import Problem, Solution, Status, solve
from checkmate.core.solution import Query, Refusal
from checkmate.errors import BudgetError, SolverError
from checkmate.solvers.auto import Portfolio
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import Clock, Incumbent, Task
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.highs import Result, SolveStatus
from checkmate.solvers.linear.model import Model
from checkmate.solvers.search import min_budget as search
from checkmate.solvers.search.min_budget import least_memory
from checkmate.solvers.solve import attempt, cheapest_split, min_budget
from checkmate.units import exact_bytes
from tests.solvers.checks import check, takes_less_than
from tests.solvers.steps import layers
from tests.support.oracle import optima, random_problem
from tests.support.sampling import every, long, slow

WITHOUT_HOST = [name for name, method in METHODS.items() if not method.needs_host]

STEPS = {"vgg": dags.vgg(8), "resnet": dags.resnet((1, 1, 1, 1)), "unet": dags.unet(2), "gpt": dags.gpt(2)}


@pytest.mark.parametrize("method", WITHOUT_HOST)
def test_every_method_answers_to_its_name(method: str) -> None:
    problem = dags.unit_chain(5)
    solution = solve(problem, 9, method=method, time_limit=20)
    check(solution)
    whatever_the_budget = {"last-node": 26.0, "chen-sqrt": 14.0, "ap-sqrt": 14.0, "linearized-sqrt": 14.0}  # seconds
    assert solution.cost == whatever_the_budget.get(method, 11.0)  # 11 where nothing runs twice
    assert solution.method in (method, "checkpoint-all")


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_option_is_refused_with_the_known_ones(method: str) -> None:
    options = ", ".join(METHODS[method].options) or "none"
    with pytest.raises(ValueError, match=re.escape(f"{method!r} has no option 'foo'. Its options are {options}.")):
        solve(dags.unit_chain(3), 5, method=method, foo=1)


NONE = {
    "method": (["magic"], ValueError, r"no method 'magic'.*auto, checkpoint-all"),
    "time_limit": ([0, -1.0, math.nan, math.inf, "10", None, True], ValueError, r"time_limit is a .*number"),
    "gap": ([-1e-9, 1.1, math.nan, math.inf, "1%", None, True], ValueError, r"gap is a (share|number)"),
    "budget": ([0, -1, 0.5, "much", "5 GBB", math.nan, math.inf, True], BudgetError, None),
}


@pytest.mark.parametrize(("option", "given"), [(name, value) for name in NONE for value in NONE[name][0]])
def test_what_is_out_of_range_is_refused(option: str, given: object) -> None:
    with pytest.raises(NONE[option][1], match=NONE[option][2]):
        solve(dags.unit_chain(3), **{"budget": 5, option: given})


def test_a_budget_that_keeps_everything_is_met_at_once_and_optimal_as_people_write_it() -> None:
    for problem in STEPS.values():
        solution = solve(problem, problem.keep_all_peak)
        assert (solution.status, solution.gap, solution.peak) == (Status.OPTIMAL, 0.0, problem.keep_all_peak)
        assert solution.cost == pytest.approx(problem.keep_all_cost)
    assert [solve(dags.unit_chain(3), at).budget for at in ("5 B", 5, 5.0, np.int64(5), "0.005 kB")] == [5] * 5


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
    assert (refused.status, refused.plan, refused.gap) == (Status.INFEASIBLE, None, math.inf)
    least, op = refused.refusal.min_budget, problem.graph.ops[int(problem.unavoidable_bytes.argmax())].name
    assert refused.refusal.op == op
    assert all(said in refused.message for said in (op, exact_bytes(least, up=True)))
    assert least == min_budget(problem).peak == checkmate.min_budget(problem).peak >= floor
    check(solve(problem, least, time_limit=5))


def test_a_slow_smallest_budget_names_the_smallest_that_takes_less_than_twice() -> None:
    problem = dags.unit_chain(40)
    least, R = least_memory(problem)
    times, once = R.sum() / problem.keep_all_cost, problem.keep_all_cost
    assert times > 10
    slow = min_budget(problem).slow
    assert (slow.times, str(slow)) == (pytest.approx(times), str(min_budget(problem)).split("; ")[-1].removesuffix(")"))
    assert solve(problem, slow.budget, time_limit=5).cost <= slow.times_there * once * (1 + 1e-9) < 2 * once
    said = f"There a step takes at most {times:.1f} times as long; with {slow.budget} B, {slow.times_there:.1f} times."
    assert solve(problem, least - 1).message.endswith(said)
    few = dags.unit_chain(2)
    assert "as long" not in solve(few, 2).message
    assert min_budget(few).slow is None


def test_a_refusal_names_the_line_of_the_users_code() -> None:
    problem = Problem.from_dag([[], [0]], [1] * 2, [10] * 2)
    load, mix = problem.graph.ops
    mix = replace(mix, name="mix", where="model.py:12 in forward")
    problem = replace(problem, graph=replace(problem.graph, ops=(load, mix)))
    assert "mix (model.py:12 in forward) alone needs 20 B" in solve(problem, 19).message


def test_what_is_proven_to_have_no_schedule_is_refused_as_such() -> None:
    problem = random_problem(52)
    budget = optima(problem)[-1][0]  # the highest that no schedule meets
    assert budget >= problem.unavoidable_bytes.max()  # of which no single op tells
    solution = solve(problem, budget)
    assert (solution.status, solution.refusal.min_budget) == (Status.INFEASIBLE, budget + 1)


def test_cost_and_bound_never_rise_with_the_budget() -> None:
    for seed in range(500, 520):
        problem = random_problem(seed, most_ops=7)
        budgets = np.unique(np.linspace(max(1, min_budget(problem).peak), problem.keep_all_peak, 8).astype(int))
        costs = [solve(problem, int(budget), gap=0.0).cost for budget in budgets]
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(costs))


@pytest.mark.parametrize("name", STEPS)
def test_the_gap_asked_for_is_reached_on_training_steps(name: str) -> None:
    problem = STEPS[name]
    budget = (2 * int(problem.unavoidable_bytes.max()) + 3 * problem.keep_all_peak) // 5
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
    began = time.perf_counter()
    with takes_less_than(2.5):
        solution = solve(problem, int(0.6 * problem.keep_all_peak), time_limit=1.0, gap=0.0)
    assert solution.seconds == pytest.approx(time.perf_counter() - began, abs=0.2)
    check(solution)


@pytest.mark.parametrize(
    ("method", "problem", "share"),
    [
        *((method, dags.unit_chain(7), 0.6) for method in ("auto", "next-use", "milp", "lp-rounding")),
        long("auto", STEPS["unet"], 0.8),
        long("next-use", dags.unet(3), 0.7),
        long("lp-rounding", dags.unit_chain(8), 0.5),
    ],
)
def test_a_seed_gives_the_same_plan_where_time_does_not_bind(method: str, problem: Problem, share: float) -> None:
    seeded = {"seed": 3} if "seed" in METHODS[method].options else {}
    budget = int(share * problem.keep_all_peak)
    first, second = (solve(problem, budget, method=method, time_limit=100, **seeded) for _ in range(2))
    assert first.plan == second.plan is not None
    assert first.bound == second.bound
    assert first.seconds + second.seconds < 60  # so the limit did not bind


def _answers(value: float | None, outcome: SolveStatus, bound: float) -> Callable[..., Result]:
    """Every variable has one value; None: noise."""

    def run(model: Model, **options: Any) -> Result:
        x = np.random.default_rng(0).random(model.columns) if value is None else np.full(model.columns, value)
        return Result(outcome, x, 0.0, bound)

    return run


_fails = Mock(side_effect=SolverError("HiGHS failed to run."))


RUBBISH = {
    "fails": _fails,
    "runs out of time": lambda model, **_: Result(SolveStatus.STOPPED, None, math.inf, highs.least_objective(model)),
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
    solution = solve(dags.unit_chain(8), 6, method=method, time_limit=5)  # its optimum takes 21 s
    if solution.plan is None:
        assert method != "auto"
        assert solution.status is Status.NOT_FOUND
        assert f"{method} f" in solution.message  # found nothing, or failed
        assert solution.refusal.min_budget <= 6
    else:
        check(solution)
        assert 21 <= solution.cost <= (22 if method == "auto" else math.inf)  # 22 by next use
        assert solution.status is Status.FEASIBLE or solution.cost == 21


@pytest.mark.slow
def test_auto_keeps_its_plan_where_a_stage_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(highs, "run", _fails)
    solution = solve(dags.unit_chain(30), 8, time_limit=1)
    assert solution.status is Status.FEASIBLE
    assert "HiGHS failed to run." in solution.details["failed"]
    assert "HiGHS failed to run." in caplog.text


def test_a_failure_is_told_and_a_plan_that_was_reported_before_survives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_late(model: Model, **options: Any) -> Result:
        run(model, **options)
        raise SolverError("lost the result")

    run = highs.run
    monkeypatch.setattr(highs, "run", _fails)
    solution = solve(dags.unit_chain(8), 6, method="milp")
    assert solution.status is Status.NOT_FOUND
    assert solution.message.startswith("milp failed: HiGHS failed to run. milp found no schedule within 6 B")
    monkeypatch.setattr(highs, "run", fail_late)
    solution = solve(dags.unit_chain(8), 6, method="milp")
    check(solution)
    assert (solution.cost, solution.details["failed"]) == (21, ["lost the result"])


def test_one_op_is_a_problem_too_and_a_step_of_no_time_and_no_bytes() -> None:
    problem = Problem.from_dag([[]], seconds=[1.0], sizes=[4])
    assert solve(problem, 4).cost == 1.0
    assert solve(problem, 3).refusal == Refusal(4, "op0", "op0 alone needs 4 B")
    problem = Problem.from_dag([[], [0], [0, 1]], seconds=[0.0] * 3, sizes=[0] * 3)
    assert (solve(problem, 1).gap, min_budget(problem).peak) == (0.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("vgg", 0.6), ("mobilenet", 0.5), ("gpt", 0.5)])
def test_the_full_size_steps_are_closed(name: str, share: float) -> None:
    problem = dags.SHAPES[name]()
    solution = solve(problem, int(share * problem.keep_all_peak), time_limit=60, gap=1e-3)
    check(solution)
    assert solution.gap <= 1e-3


CHAIN: list[list[int]] = [[], [0], [1], [2], [0, 1, 3]]


def _problem(seconds: int, sizes: list[int], name: str, smaller: Problem | None) -> Problem:
    problem = Problem.from_dag(CHAIN, seconds=[seconds] * 5, sizes=sizes)
    return replace(problem, splits=(name,) if name else (), next_split=lambda: smaller)


SMALL = _problem(4, [1, 1, 1, 1, 1], "small", None)
ROOMY = _problem(2, [1, 1, 1, 1, 1], "roomy", SMALL)
TIGHT = _problem(1, [3, 3, 1, 1, 1], "tight", ROOMY)
WHOLE = _problem(1, [9, 9, 9, 9, 9], "", TIGHT)


def test_the_cheapest_split_is_taken_and_none_where_all_fits() -> None:
    assert attempt(Query(WHOLE, 8, seconds=1)).plan is None
    cheapest = min(attempt(Query(one, 8, seconds=1)).cost for one in (TIGHT, ROOMY, SMALL))
    assert solve(WHOLE, 8, time_limit=1).cost == cheapest
    for budget in (45, 36):
        assert solve(WHOLE, budget, time_limit=1).problem is WHOLE


def test_splits_that_cannot_be_cheaper_are_not_asked_for() -> None:
    never = Mock(side_effect=AssertionError("asked for"))
    tight = replace(_problem(1, [1, 1, 1, 1, 1], "tight", None), next_split=never)
    assert solve(_problem(1, [9, 9, 9, 9, 9], "", tight), 8, time_limit=1).problem is tight


def test_all_splits_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Mock(wraps=attempt)
    monkeypatch.setattr(sys.modules[solve.__module__], "attempt", attempts)
    assert solve(WHOLE, 2, time_limit=1).plan is None
    assert [call.args[0].seconds for call in attempts.call_args_list] == [1, 1 / 2, 1 / 4, 1 / 8]


def test_no_problem_takes_all_the_time_where_the_next_split_has_a_plan_at_once() -> None:
    asked: list[Query] = []

    def solver(query: Query) -> Solution:
        asked.append(query)
        return Solution(Status.NOT_FOUND, WHOLE, 8, "auto") if query.problem is WHOLE else attempt(query)

    assert cheapest_split(solver, look_on=False)(Query(WHOLE, 8)).problem is TIGHT
    moment = asked[0].patience
    assert moment < 1
    assert [(query.problem.splits, query.patience) for query in asked] == [((), moment), (("tight",), moment)]


def test_where_none_has_a_plan_after_a_moment_those_given_up_are_looked_at_for_long() -> None:
    asked: list[tuple[str, float]] = []

    def solver(query: Query) -> Solution:
        name = query.problem.splits[0] if query.problem.splits else ""
        asked.append((name, query.seconds if query.patience == math.inf else 0.0))
        if name == "roomy" and query.patience == math.inf:
            return attempt(query)
        return Solution(Status.INFEASIBLE if name == "tight" else Status.NOT_FOUND, query.problem, 8, "auto")

    assert cheapest_split(solver)(Query(WHOLE, 8)).problem is ROOMY
    assert asked == [("", 0.0), ("tight", 0.0), ("roomy", 0.0), ("small", 0.0), ("", 60.0), ("roomy", 30.0)]


def test_auto_gives_up_without_a_plan_and_goes_on_with_one() -> None:
    incumbent = Incumbent(Task(WHOLE, 36, Clock(100.0)))
    search = Portfolio(incumbent.task, incumbent, settle=0.0, known=None, patience=0.5)
    assert search.left < 0.5
    incumbent.best, incumbent.cost = solve(WHOLE, 36), 5.0
    assert search.left > 99.0
    assert solve(WHOLE, 36, patience=0.5).plan is not None


def test_a_plan_of_more_than_double_the_step_names_a_budget_that_halves_it() -> None:
    problem = layers(10, size=1)  # near its smallest budget the chain runs again and again
    slow = solve(problem, min_budget(problem).peak, time_limit=5)
    assert slow.cost > 2 * problem.keep_all_cost
    more, seconds = slow.details["halved"]
    assert slow.budget < more <= problem.keep_all_peak
    assert seconds <= slow.cost / 2
    assert solve(problem, more, time_limit=5).cost <= seconds * (1 + 1e-9)
    assert "with more" in str(slow)
    assert "halved" not in solve(problem, problem.keep_all_peak).details


def test_the_budget_that_halves_is_found_in_a_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the budget is less than one byte."""
    tries = Mock(wraps=search._first_seconds)
    monkeypatch.setattr(search, "_first_seconds", tries)
    solution = solve(dags.unit_chain(8), 3)
    tried = [call.args[1] for call in tries.call_args_list]
    assert solution.details["halved"][0] in tried
    assert len(tried) == len({*tried}) > 1
