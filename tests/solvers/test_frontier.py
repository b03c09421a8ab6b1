"""Cost against peak: what rows learn from each other, where they are solved, and what happens when that fails."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem, Solution, Status, frontier, solve
from checkmate.errors import BudgetError, SolverError
from checkmate.solvers import frontier as module
from checkmate.solvers.catalogue import METHODS, Method
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.frontier import BUDGETS, Frontier
from checkmate.solvers.solve import min_budget
from tests.solvers.checks import by
from tests.support.oracle import optima, random_problem
from tests.support.paper_equations import violations
from tests.support.sampling import in_turn

CHAIN = dags.unit_chain(8)  # 17 ops; the optimum at 3, 4, 5, 6, 8 bytes takes 45, 26, 22, 21, 19 s


def check(found: Frontier, problem: Problem) -> None:
    """Each row's plan verifies within its budget, and the figures are its solution's."""
    for row in found:
        of = row.solution
        assert of.problem is problem
        assert (row.budget, row.cost, row.bound, row.gap) == (of.budget, of.cost, of.bound, of.gap)
        if of.schedule is not None:
            assert violations(of.schedule, problem, row.budget) == []
            assert row.bound <= row.cost


@functools.cache
def optimal(budget: int) -> Solution:
    return by("milp")(CHAIN, budget)


def add_method(
    monkeypatch: pytest.MonkeyPatch, plan_of: dict[int, int], bounds: dict[int, float] | None = None
) -> None:
    """A method "fake" that answers a budget with the optimal plan for another, or with a bound alone."""

    def fake(task: Task, incumbent: Incumbent) -> Remarks:
        if task.budget in plan_of:
            incumbent.offer(optimal(plan_of[task.budget]).schedule.R, "fake")
        incumbent.prove((bounds or {}).get(task.budget, 0.0))
        return Remarks()

    monkeypatch.setitem(METHODS, "fake", Method("fake", "of tests", "here", fake))


@in_turn(seed=range(8))
def test_it_is_the_optimum_of_brute_force_at_every_budget(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    best = {max(1, budget): cost for budget, cost in optima(problem)}
    found = frontier(problem, list(best), methods=["milp", "auto"], gap=0.0, jobs=1)
    check(found, problem)
    for row in found:
        assert row.cost == pytest.approx(best[row.budget]) == pytest.approx(row.bound)


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
    rows = [(row.method, row.cost, row.bound) for row in (found[0], found[2])]
    assert rows == [("next-use", own.cost, 22), ("milp", 22, 22)]


PROVEN: dict[str, tuple[dict[int, int], dict[int, float], dict[int, tuple[float, float]]]] = {
    "holds for smaller budgets": (
        {4: 4, 5: 5, 6: 6, 8: 8}, {6: 21.0}, {4: (26, 21), 5: (22, 21), 6: (21, 21), 8: (19, 17)}
    ),
    "and for no larger ones": ({4: 4, 5: 4, 6: 5}, {5: 24.0}, {4: (26, 24), 5: (26, 24), 6: (22, 17)}),
    "is dropped where a plan contradicts it": ({5: 5}, {6: math.inf}, {5: (22, 17), 6: (22, 17)}),
}  # fmt: skip


@pytest.mark.parametrize("case", PROVEN)
def test_what_is_proven(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    plan_of, bounds, found = PROVEN[case]
    add_method(monkeypatch, plan_of, bounds)
    rows = frontier(CHAIN, list(found), methods=["fake"], jobs=1)
    assert {row.budget: (row.cost, row.bound) for row in rows} == found
    assert all(row.status is (Status.OPTIMAL if row.cost == row.bound else Status.FEASIBLE) for row in rows)


def test_what_is_proven_impossible_is_so_for_smaller_budgets() -> None:
    problem = random_problem(351, most_ops=4)
    impossible = optima(problem)[-1][0]
    assert impossible - 1 >= problem.unavoidable_bytes.max()  # so that it takes a solver to prove it
    found = frontier(problem, [impossible - 1, impossible, impossible + 1], methods=["next-use", "milp"], jobs=1)
    assert [found[i].status for i in (0, 1, 5)] == [Status.INFEASIBLE, Status.INFEASIBLE, Status.OPTIMAL]
    assert found[0].cost == math.inf


def test_budgets_by_default_and_as_people_write_them_once_each_and_in_order() -> None:
    """Budgets are by default from the smallest to keeping everything."""
    problem = dags.vgg(8)
    found = frontier(problem, methods=["next-use"], time_limit=1, jobs=1)
    assert len(found) == BUDGETS
    assert (found[0].budget, found[-1].budget) == (min_budget(problem).peak, problem.keep_all_peak)
    assert found[-1].cost == pytest.approx(problem.keep_all_cost)
    methods = ["next-use", "checkpoint-all"]
    found = frontier(CHAIN, ["0.009 kB", 5, "9 B", 6.0], methods=methods, jobs=1)
    assert [(row.method, row.budget) for row in found] == [(method, at) for method in methods for at in (5, 6, 9)]


def test_in_processes_and_in_any_executor_it_is_the_same_as_here() -> None:
    emit = lambda plan: len(plan.steps)  # noqa: E731  # what cannot travel, and is there afterwards
    problem = replace(dags.unit_chain(4), codegen=emit)
    with ThreadPoolExecutor(2) as threads:
        places = ({"jobs": 2}, {"jobs": 1}, {"client": threads})
        there, *others = (frontier(problem, [4, 5], methods=["milp"], **place) for place in places)
    figures = [(row.method, row.budget, row.status, row.cost, row.peak) for row in there]
    for found in others:
        assert [(row.method, row.budget, row.status, row.cost, row.peak) for row in found] == figures
    check(there, problem)
    assert there[0].solution.modules == len(there[0].solution.plan.steps)
    assert there[0].solution.details["trajectory"]


class Elsewhere:
    """A client; what comes of a call is a function of its number and of how it is answered."""

    def __init__(self, come_to: Callable[[int, Callable[[], Any]], Any]) -> None:
        self.calls, self.come_to = itertools.count(1), come_to

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self.come_to(next(self.calls), partial(call, *arguments)))
        except (OSError, SolverError) as error:
            future.set_exception(error)
        return future


def _fail_second(call: int, answer: Callable[[], Any]) -> Any:
    if call == 2:
        raise OSError("the machine went away")
    return answer()


@pytest.mark.slow
def test_a_failure_there_loses_no_other_row() -> None:
    """Nothing is found without a plan for a smaller budget."""
    found = frontier(CHAIN, [4, 5, 6], methods=["milp"], client=Elsewhere(_fail_second))
    assert [(row.cost, row.from_budget) for row in found] == [(26, None), (26, 4), (21, None)]
    assert found[1].message == "the machine went away"
    assert frontier(CHAIN, [5, 4], methods=["next-use", "milp"], client=Elsewhere(_fail_second))[1].from_budget == 4
    row = frontier(CHAIN, [4], methods=["milp", "next-use"], client=Elsewhere(_fail_second))[1]
    assert (row.status, row.cost, row.peak, row.message) == (Status.NOT_FOUND, math.inf, None, found[1].message)


def test_rubbish_from_elsewhere_becomes_no_plan() -> None:
    def rubbish(call: int, answer: Callable[[], Solution]) -> Solution:
        solution = answer()
        R = np.zeros_like(solution.schedule.R)
        return replace(solution, schedule=replace(solution.schedule, R=R), bound=0.0)

    (row,) = frontier(CHAIN, [5], methods=["milp"], client=Elsewhere(rubbish))
    assert row.status is Status.NOT_FOUND
    assert "milp is wrong" in row.message


def test_a_process_that_dies_is_a_row_that_says_so() -> None:
    def die(call: int, answer: Callable[[], Any]) -> Any:
        return answer() if call == 1 else module.Processes(1).submit(os._exit, 9).result()

    found = frontier(CHAIN, [5, 6], methods=["milp"], client=Elsewhere(die))
    assert found[0].cost == found[1].cost == 22
    assert "code 9" in found[1].message


def test_an_interrupt_or_an_error_of_one_solve_here_loses_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt leaves what was found; before anything is, it is raised."""
    error: BaseException = KeyboardInterrupt()

    def failing(problem: Problem, budget: int, **options: Any) -> Solution:
        if budget == 6:
            raise error
        return solve(problem, budget, **options)

    monkeypatch.setattr(module, "solve", failing)
    found = frontier(CHAIN, [5, 6, 8], methods=["milp"], jobs=1)
    assert [(row.cost, row.from_budget) for row in found] == [(22, None), (22, 5), (22, 5)]
    with pytest.raises(KeyboardInterrupt):
        frontier(CHAIN, [6, 8], methods=["milp"], jobs=1)
    error = SolverError("out of luck")
    found = frontier(CHAIN, [6, 8], methods=["milp"], jobs=1)
    assert [(row.status, row.message) for row in found] == [(Status.NOT_FOUND, "out of luck"), (Status.OPTIMAL, "")]


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

    monkeypatch.setitem(METHODS, "milp", replace(METHODS["milp"], run=slow))
    for seconds, says in ((0.01, "not found: the time was over, after "), (9.0, "stands in the way")):
        assert says in repr(frontier(CHAIN, 5, methods=["milp"], time_limit=seconds, jobs=1))


def test_one_budget_and_one_method_may_stand_by_themselves_and_options_go_to_methods_that_take_them() -> None:
    assert [(row.method, row.cost) for row in frontier(CHAIN, "4 B", jobs=1)] == [("auto", 26)]
    assert [(row.method, row.cost) for row in frontier(CHAIN, 8, methods="milp", jobs=1)] == [("milp", 19)]
    found = frontier(CHAIN, [8], methods=["milp", "next-use"], formulation="paper", jobs=1)
    assert found[0].solution.details["formulation"] == "paper"


@in_turn(client=[None, ThreadPoolExecutor(1)], progress=[True, False, None])
def test_a_frontier_may_show_its_progress_or_none(client: Any, progress: bool | None) -> None:
    asked: list[object] = []

    def showing(*_: object, shown: bool | None = None, **__: object) -> AbstractContextManager[None]:
        asked.append(shown)
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        for module in ("frontier", "solve"):
            patch.setattr(f"checkmate.solvers.{module}.showing", showing)
        assert frontier(CHAIN, 8, jobs=1, client=client, progress=progress)[0].cost == 19
    assert progress in asked
    assert {*asked} <= {progress, False}


@pytest.mark.parametrize("call", [partial(solve, budget=4), partial(frontier, budgets=4), min_budget])
@pytest.mark.parametrize(("given", "kind"), [(check, "function check"), ({}, "dict"), (None, "NoneType")])
def test_a_step_is_no_problem(call: Callable[..., Any], given: Any, kind: str) -> None:
    with pytest.raises(TypeError) as refused:
        call(given)
    assert str(refused.value) == f"This takes a Problem, not {kind}. Make one: checkmate.trace(step, *batch)."


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"methods": ["magic"]}, ValueError, "no method 'magic'"),
        ({"methods": ["auto", "next-use"], "foo": 1}, ValueError, "'auto' has no option 'foo'"),
        ({"time_limit": 0}, ValueError, "time_limit"),
        ({"gap": float("nan")}, ValueError, "gap"),
        ({"jobs": 0}, ValueError, "jobs"),
        ({"jobs": 1.5}, ValueError, "jobs"),
        ({"budgets": [0.5, 5]}, BudgetError, "not a ratio"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        frontier(CHAIN, **{"budgets": [5], **options})


def test_records_are_numbers_and_text_and_pandas_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = frontier(CHAIN, [5], methods=["milp"], jobs=1)
    (record,) = found.records()
    figures = {"cost": 22.0, "overhead": pytest.approx(5 / 17), "bound": 22.0, "gap": 0.0, "peak": 5}
    said = {"method": "milp", "status": "optimal", "from_budget": None, "message": ""}
    assert record == {"budget": 5, "seconds": record["seconds"], **figures, **said}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        found.to_pandas()


def test_pandas_gets_the_records() -> None:
    pandas = pytest.importorskip("pandas")
    found = frontier(CHAIN, [5, 6], methods=["milp"], jobs=1)
    pandas.testing.assert_frame_equal(found.to_pandas(), pandas.DataFrame(found.records()))
