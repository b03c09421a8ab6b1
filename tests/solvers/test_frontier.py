"""Cost against peak: what rows learn from each other, where they are solved, and what happens when that fails."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.errors import BudgetError, SolverError
from checkmate.solvers import frontier as module
from checkmate.solvers.catalogue import METHODS, Method
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Task
from checkmate.solvers.frontier import BUDGETS, Frontier, frontier
from checkmate.solvers.solve import min_budget, solve
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem
from tests.support.sampling import in_turn

milp = METHODS["milp"].solve

CHAIN = dags.unit_chain(8)  # 17 ops; the optimum at 3, 4, 5, 6, 8 bytes takes 45, 26, 22, 21, 19 s
GOLDEN = {3: 45, 4: 26, 5: 22, 6: 21, 8: 19}


def check(found: Frontier, problem: Problem) -> None:
    """Each row's plan verifies within its budget, and the figures are its solution's."""
    for row in found:
        solution = row.solution
        assert solution.problem is problem
        assert (row.budget, row.cost, row.bound, row.gap) == (
            solution.budget,
            solution.cost,
            solution.bound,
            solution.gap,
        )
        if solution.schedule is not None:
            assert solution.schedule.violations(problem, row.budget) == []
            assert row.bound <= row.cost


@functools.cache
def optimal(budget: int) -> Solution:
    return milp(CHAIN, budget)


def add_method(
    monkeypatch: pytest.MonkeyPatch, plan_of: dict[int, int], bounds: dict[int, float] | None = None
) -> None:
    """A method "fake" that answers each budget with the optimal plan for another, smaller one."""

    def fake(task: Task, incumbent: Incumbent) -> Remarks:
        schedule = optimal(plan_of[task.budget]).schedule
        assert schedule is not None
        incumbent.offer(schedule.R, "fake")
        incumbent.prove((bounds or {}).get(task.budget, 0.0))
        return Remarks()

    monkeypatch.setitem(METHODS, "fake", Method("fake", "of tests", "here", fake))


def test_the_known_optima() -> None:
    found = frontier(CHAIN, list(GOLDEN), methods=["milp"], jobs=1)
    assert {row.budget: row.cost for row in found} == GOLDEN
    assert all(row.status is Status.OPTIMAL and row.from_budget is None for row in found)
    check(found, CHAIN)


@in_turn(seed=range(8))
def test_it_is_the_optimum_of_brute_force_at_every_budget(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    known = outcomes(problem)
    budgets = [max(1, budget) for budget in interesting_budgets(known)]
    found = frontier(problem, budgets, methods=["milp", "auto"], gap=0.0, jobs=1)
    check(found, problem)
    for row in found:
        assert row.cost == pytest.approx(optimum(known, row.budget))
        assert row.bound == pytest.approx(optimum(known, row.budget))


def test_cost_never_rises_with_the_budget_though_the_methods_does(monkeypatch: pytest.MonkeyPatch) -> None:
    add_method(monkeypatch, {4: 4, 5: 5, 6: 4, 8: 3, 9: 8})
    budgets = [4, 5, 6, 8, 9]
    assert [solve(CHAIN, budget, method="fake").cost for budget in budgets] == [26, 22, 26, 45, 19]
    found = frontier(CHAIN, budgets, methods=["fake"], jobs=1)
    assert [(row.cost, row.from_budget) for row in found] == [(26, None), (22, None), (22, 5), (22, 5), (19, None)]
    assert "from 5 B" in repr(found)
    check(found, CHAIN)


def test_plans_stay_within_a_method_and_bounds_are_shared() -> None:
    found = frontier(CHAIN, [5, 6], methods=["next-use", "milp"], jobs=1)
    own = solve(CHAIN, 5, method="next-use")
    assert own.bound == 17
    greedy, exact = found[0], found[2]
    assert (greedy.method, greedy.cost, greedy.bound) == ("next-use", own.cost, 22)
    assert (exact.method, exact.cost) == ("milp", 22)


def test_a_bound_holds_for_smaller_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    add_method(monkeypatch, {4: 4, 5: 5, 6: 6, 8: 8}, bounds={6: 21.0})
    found = frontier(CHAIN, [4, 5, 6, 8], methods=["fake"], jobs=1)
    assert [row.bound for row in found] == [21, 21, 21, 17]
    assert [row.status for row in found] == [Status.FEASIBLE, Status.FEASIBLE, Status.OPTIMAL, Status.FEASIBLE]


def test_a_bound_does_not_hold_for_larger_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    add_method(monkeypatch, {4: 4, 5: 4, 6: 5}, bounds={5: 24.0})
    assert [row.bound for row in frontier(CHAIN, [4, 5, 6], methods=["fake"], jobs=1)] == [24, 24, 17]


def test_a_claim_that_a_plan_contradicts_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(task: Task, incumbent: Incumbent) -> Remarks:
        if task.budget == 6:
            incumbent.prove(math.inf)
            return Remarks()
        schedule = optimal(task.budget).schedule
        assert schedule is not None
        incumbent.offer(schedule.R, "wrong")
        return Remarks()

    monkeypatch.setitem(METHODS, "wrong", Method("wrong", "of tests", "here", wrong))
    found = frontier(CHAIN, [5, 6], methods=["wrong"], jobs=1)
    assert [(row.status, row.cost, row.bound) for row in found] == [(Status.FEASIBLE, 22, 17)] * 2


def test_what_is_proven_impossible_is_so_for_smaller_budgets() -> None:
    problem = random_problem(351, most_ops=4)
    impossible = interesting_budgets(outcomes(problem))[-1]
    assert impossible - 1 >= problem.unavoidable_bytes.max()  # so that it takes a solver to prove it
    found = frontier(problem, [impossible - 1, impossible, impossible + 1], methods=["next-use", "milp"], jobs=1)
    assert [row.status for row in found][:2] == [Status.INFEASIBLE] * 2
    assert found[0].cost == math.inf
    assert found[5].status is Status.OPTIMAL


def test_default_budgets_go_from_the_smallest_to_keeping_everything() -> None:
    problem = dags.vgg(8)
    found = frontier(problem, methods=["next-use"], time_limit=1, jobs=1)
    assert len(found) == BUDGETS
    assert (found[0].budget, found[-1].budget) == (min_budget(problem).peak, problem.keep_all_peak)
    assert found[-1].cost == pytest.approx(problem.keep_all_cost)


def test_budgets_as_people_write_them_once_each_and_in_order() -> None:
    found = frontier(CHAIN, ["0.009 kB", 5, "9 B", 6.0], methods=["next-use", "checkpoint-all"], jobs=1)
    assert [(row.method, row.budget) for row in found] == [
        ("next-use", 5),
        ("next-use", 6),
        ("next-use", 9),
        ("checkpoint-all", 5),
        ("checkpoint-all", 6),
        ("checkpoint-all", 9),
    ]


# Where it is solved.


def test_in_processes_it_is_the_same_as_here() -> None:
    emit = lambda plan: len(plan.steps)  # noqa: E731  # what cannot travel, and is there afterwards
    problem = replace(dags.unit_chain(4), codegen=emit)
    there = frontier(problem, [4, 5], methods=["milp"], jobs=2)
    here = frontier(problem, [4, 5], methods=["milp"], jobs=1)
    figures = [[(row.method, row.budget, row.status, row.cost, row.peak) for row in found] for found in (there, here)]
    assert figures[0] == figures[1]
    check(there, problem)
    plan = there[0].solution.plan
    assert plan is not None
    assert there[0].solution.modules == len(plan.steps)
    assert there[0].solution.details["trajectory"]


def test_any_executor_may_solve() -> None:
    with ThreadPoolExecutor(2) as threads:
        found = frontier(CHAIN, [5, 4], methods=["milp"], client=threads)
    assert [row.cost for row in found] == [26, 22]


class Elsewhere:
    """A client whose calls come to what is asked."""

    def __init__(self, come_to: Callable[[int, Callable[[], Any]], Any]) -> None:
        self.calls, self.come_to = 0, come_to

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls += 1
        try:
            future.set_result(self.come_to(self.calls, lambda: call(*arguments)))
        except (OSError, SolverError) as error:
            future.set_exception(error)
        return future


def _fail_second(call: int, answer: Callable[[], Any]) -> Any:
    if call == 2:
        raise OSError("the machine went away")
    return answer()


@pytest.mark.slow
def test_a_failure_there_loses_no_other_row() -> None:
    found = frontier(CHAIN, [4, 5, 6], methods=["milp"], client=Elsewhere(_fail_second))
    assert [row.cost for row in found] == [26, 26, 21]
    assert found[1].from_budget == 4
    assert found[1].message == "the machine went away"
    found = frontier(CHAIN, [5, 4], methods=["next-use", "milp"], client=Elsewhere(_fail_second))
    assert found[1].from_budget == 4


def test_a_failure_without_a_smaller_plan_is_not_found() -> None:
    found = frontier(CHAIN, [4], methods=["milp", "next-use"], client=Elsewhere(_fail_second))
    row = found[1]
    assert (row.status, row.cost, row.peak, row.message) == (Status.NOT_FOUND, math.inf, None, "the machine went away")


def test_rubbish_from_elsewhere_becomes_no_plan() -> None:
    def rubbish(call: int, answer: Callable[[], Solution]) -> Solution:
        solution = answer()
        assert solution.schedule is not None
        schedule = replace(solution.schedule, R=np.zeros_like(solution.schedule.R))
        return replace(solution, schedule=schedule, bound=0.0)

    (row,) = frontier(CHAIN, [5], methods=["milp"], client=Elsewhere(rubbish))
    assert row.status is Status.NOT_FOUND
    assert "milp is wrong" in row.message


def test_a_process_that_dies_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(call: int, answer: Callable[[], Solution]) -> Any:
        return answer() if call == 1 else module.Processes(1).submit(os._exit, 9).result()

    found = frontier(CHAIN, [5, 6], methods=["milp"], client=Elsewhere(die))
    assert found[0].cost == found[1].cost == 22
    assert "code 9" in found[1].message


def test_an_interrupt_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(problem: Problem, budget: int, **options: Any) -> Solution:
        if budget == 6:
            raise KeyboardInterrupt
        return solve(problem, budget, **options)

    monkeypatch.setattr(module, "solve", interrupted)
    found = frontier(CHAIN, [5, 6, 8], methods=["milp"], jobs=1)
    assert [(row.cost, row.from_budget) for row in found] == [(22, None), (22, 5), (22, 5)]
    with pytest.raises(KeyboardInterrupt):
        frontier(CHAIN, [6, 8], methods=["milp"], jobs=1)


def test_an_error_of_one_solve_here_loses_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(problem: Problem, budget: int, **options: Any) -> Solution:
        if budget == 5:
            raise SolverError("out of luck")
        return solve(problem, budget, **options)

    monkeypatch.setattr(module, "solve", failing)
    found = frontier(CHAIN, [5, 6], methods=["milp"], jobs=1)
    assert [row.status for row in found] == [Status.NOT_FOUND, Status.OPTIMAL]
    assert found[0].message == "out of luck"


# Why there is no plan.


def test_the_table_says_why_a_method_found_nothing() -> None:
    methods = ["auto", "checkpoint-all", "chen-sqrt"]
    table = repr(frontier(CHAIN, [2, 4], methods=methods, jobs=1))
    whys = [line.partition("infeasible: ")[2] or line.partition("not found: ")[2] for line in table.splitlines()[1:]]
    alone = "op9 alone needs 3 B"
    reached = "the smallest peak it reaches is 6 B, and it has no other schedule"
    assert whys == [alone, "", alone, "keeping everything takes 10 B", alone, reached]
    table = repr(frontier(dags.resnet((1, 1)), [10**5], methods=["chen-sqrt"], jobs=1))
    assert re.search(r"not found: it is for chains, and this forward is none|infeasible: \w+ .*needs", table)


@pytest.mark.wall_clock
def test_time_that_was_over_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(task: Task, incumbent: Incumbent) -> Remarks:
        time.sleep(0.02)
        return Remarks()

    method = replace(METHODS["milp"], run=slow)
    monkeypatch.setitem(METHODS, "milp", method)
    assert "not found: the time was over, after " in repr(frontier(CHAIN, 5, methods=["milp"], time_limit=0.01, jobs=1))
    assert "stands in the way" in repr(frontier(CHAIN, 5, methods=["milp"], time_limit=9.0, jobs=1))


# What is asked for.


def test_one_budget_is_asked_for_as_it_is() -> None:
    assert (
        [row.cost for row in frontier(CHAIN, "4 B", jobs=1)] == [row.cost for row in frontier(CHAIN, 4, jobs=1)] == [26]
    )


def step(x: Any) -> Any:
    return x


@pytest.mark.parametrize("call", [partial(solve, budget=4), partial(frontier, budgets=4), min_budget])
@pytest.mark.parametrize(("given", "kind"), [(step, "function step"), ({}, "dict"), (None, "NoneType")])
def test_a_step_is_no_problem(call: Callable[..., Any], given: Any, kind: str) -> None:
    with pytest.raises(TypeError) as refused:
        call(given)
    assert str(refused.value) == f"This takes a Problem, not {kind}. Make one: checkmate.trace(step, *batch)."


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": ["magic"]}, "no method 'magic'"),
        ({"methods": ["auto", "next-use"], "foo": 1}, "'auto' has no option 'foo'"),
        ({"time_limit": 0}, "time_limit"),
        ({"gap": float("nan")}, "gap"),
        ({"jobs": 0}, "jobs"),
        ({"jobs": 1.5}, "jobs"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        frontier(CHAIN, [5], **options)


def test_a_ratio_is_no_budget() -> None:
    with pytest.raises(BudgetError, match="not a ratio"):
        frontier(CHAIN, [0.5, 5], jobs=1)


def test_options_go_to_the_methods_that_take_them() -> None:
    found = frontier(CHAIN, [5], methods=["milp", "next-use"], formulation="paper", jobs=1)
    assert found[0].solution.details["formulation"] == "paper"


def test_one_method_may_be_named_by_itself() -> None:
    assert frontier(CHAIN, [5], methods="milp", jobs=1)[0].method == "milp"


# How it looks.


def test_it_prints_as_a_table_in_text_and_html() -> None:
    found = checkmate.frontier(CHAIN, [1, 4, 5], methods=["milp"], jobs=1)
    lines = repr(found).splitlines()
    assert lines[0].split() == [
        "method",
        "budget",
        "peak",
        "step",
        "recomputed",
        "bound",
        "gap",
        "solved",
        "in",
        "status",
    ]
    assert [line.split()[:5] for line in lines[1:2]] == [["milp", "1", "B", "-", "-"]]
    assert "26.0 s" in lines[2]
    assert "52.94%" in lines[2]
    assert lines[2].endswith("optimal")
    assert len({line.index("milp") for line in lines[1:]}) == 1
    assert found._repr_html_().count("<tr>") == 4
    assert isinstance(found, checkmate.Frontier)


def test_records_are_numbers_and_text() -> None:
    (record,) = frontier(CHAIN, [5], methods=["milp"], jobs=1).records()
    assert record == {
        "method": "milp",
        "budget": 5,
        "status": "optimal",
        "cost": 22.0,
        "overhead": pytest.approx(5 / 17),
        "bound": 22.0,
        "gap": 0.0,
        "peak": 5,
        "seconds": record["seconds"],
        "from_budget": None,
        "message": "",
    }


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        frontier(CHAIN, [5], methods=["milp"], jobs=1).to_pandas()


def test_pandas_gets_the_records() -> None:
    pandas = pytest.importorskip("pandas")
    found = frontier(CHAIN, [5, 6], methods=["milp"], jobs=1)
    pandas.testing.assert_frame_equal(found.to_pandas(), pandas.DataFrame(found.records()))
