"""What is known is used, never believed: and what plain planning finds is found whatever is on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.networks import dags
from checkmate.core import files, simulator
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Solution, Status
from checkmate.solvers import plan_cache
from checkmate.solvers import plan_cache as planning
from checkmate.solvers.auto import Portfolio
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.plan_cache import Question, Record, lookup, store
from checkmate.solvers.solve import attempt, min_budget, solve
from tests.support.offers import plan


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """The options of each solve."""
    seen: list[dict] = []

    def watched(problem: Problem, budget: int, **options: object) -> Solution:
        seen.append(options)
        return attempt(problem, budget, **options)

    monkeypatch.setattr(planning, "attempt", watched)
    return seen


def _problem(batch: int = 8) -> Problem:
    return dags.resnet((1, 1, 1, 1), batch=batch)


def _between(problem: Problem, share: float = 0.4) -> int:
    low = min_budget(problem, time_limit=2).peak
    return int(low + share * (problem.keep_all_peak - low))


def _with_costs(problem: Problem, factor: float) -> Problem:
    """The same step, each second op slower."""
    seconds = problem.seconds.copy()
    seconds[::2] *= factor
    return Problem(problem.graph, Profile(seconds, problem.workspace, problem.resident))


def _check(solution: Solution) -> None:
    assert solution.plan is not None
    assert simulator.check_plan(solution.plan, solution.problem, solution.budget) == []


def test_the_second_time_nothing_is_solved(solves: list[dict]) -> None:
    budget = _between(_problem())
    first = plan(_problem(), budget, time_limit=5)
    assert len(solves) == 1
    began = time.perf_counter()
    again = plan(_problem(), budget, time_limit=5)
    assert time.perf_counter() - began < 1
    assert len(solves) == 1
    _check(again)
    assert again.origin == "plan cache"
    assert (again.cost, again.bound, again.peak, again.status) == (first.cost, first.bound, first.peak, first.status)
    assert again.problem is not first.problem


def test_a_small_gap_is_worth_little_of_the_time(solves: list[dict]) -> None:
    problem = _problem()
    budget = _between(problem)
    found = plan(problem, budget, time_limit=5)
    assert [options["settle"] for options in solves] == [planning.WAVER]
    best = Incumbent(Task(problem, budget, Clock(100.0)))
    search = Portfolio(best.task, best, settle=0.01, known=None)
    assert best.worth(search.settle) == 1.0  # there is no plan yet
    best.best, best.cost = found, 1.0
    shares = []
    for bound in (0.9, 0.99, 0.995, 0.999):
        best.bound = bound
        shares.append(best.worth(search.settle))
    assert shares == pytest.approx([1.0, 1.0, 0.5, 0.1])
    assert search.left < 10.0
    search.settle = 0.0
    assert best.worth(search.settle) == 1.0


def test_without_the_cache_all_is_anew(solves: list[dict]) -> None:
    budget = _between(_problem())
    plan(_problem(), budget, time_limit=5, cache=False)
    assert not files.folder().exists()
    plan(_problem(), budget, time_limit=5)
    plan(_problem(), budget, time_limit=5, cache=False)
    assert [options.get("start") for options in solves] == [None] * 3


def test_every_method_has_its_own_plans(solves: list[dict]) -> None:
    budget = _between(_problem())
    plan(_problem(), budget, time_limit=5)
    for _ in range(2):
        solution = plan(_problem(), budget, method="next-use", time_limit=1)
        assert solution.method == "next-use"
    assert len(solves) == 2


def test_where_all_is_kept_nothing_is_written() -> None:
    problem = _problem()
    assert plan(problem, problem.keep_all_peak).status is Status.OPTIMAL
    assert not files.folder().exists()


def test_a_plan_with_a_gap_is_improved_when_there_is_more_time(solves: list[dict]) -> None:
    problem = dags.gpt(2)
    budget = _between(problem, 0.1)
    bad = solve(problem, budget, method="next-use", time_limit=0.1)
    store(Record.of(bad, "auto", 0.1))
    assert bad.gap > 0.01
    same = plan(dags.gpt(2), budget, time_limit=0.1)
    assert (same.origin, same.cost, solves) == ("plan cache", bad.cost, [])
    better = plan(dags.gpt(2), budget, time_limit=3)
    assert better.origin == "less time"
    assert better.gap < bad.gap
    assert plan(dags.gpt(2), budget, time_limit=3).origin == "plan cache"
    assert len(solves) == 1


def test_other_costs_get_a_new_bound_and_the_old_is_not_claimed() -> None:
    problem = _problem()
    budget = _between(problem)
    first = plan(problem, budget, time_limit=5)
    cheaper = _with_costs(problem, 0.97)
    again = plan(cheaper, budget, time_limit=5)
    _check(again)
    assert again.origin == "other costs"
    truth = solve(cheaper, budget, time_limit=5)
    assert again.bound <= truth.cost < first.bound
    assert again.gap <= planning.WAVER + 1e-4
    assert plan(_with_costs(problem, 0.97), budget, time_limit=5).origin == "plan cache"
    assert plan(_problem(), budget, time_limit=5).origin == "plan cache"  # both are kept


def test_very_different_costs_are_planned_for() -> None:
    problem = _problem()
    budget = _between(problem, 0.2)
    plan(problem, budget, time_limit=5)
    other = _with_costs(problem, 30.0)
    assert plan(other, budget, time_limit=5).cost <= solve(other, budget, time_limit=5).cost * (1 + planning.WAVER)


def test_a_few_resident_bytes_more_need_no_new_plan(solves: list[dict]) -> None:
    """On a GPU what else is allocated varies from start to start."""
    problem = _problem()
    budget = _between(problem) + 64
    first = plan(problem, budget, time_limit=5)
    assert first.peak + 64 <= budget
    more = Problem(problem.graph, replace(problem.profile, resident_bytes=problem.resident + 64))
    again = plan(more, budget, time_limit=5)
    assert (again.cost, again.bound) == (first.cost, pytest.approx(first.bound))
    assert list(again.details["found"]) == ["start"]


@pytest.mark.parametrize("batch", [2, 5, 7])
def test_a_smaller_batch_is_planned_from_the_one_before_in_little_time(batch: int, solves: list[dict]) -> None:
    large, small = _problem(8), _problem(batch)
    budget = _between(large, 0.2)
    first = plan(large, budget, time_limit=5)
    second = plan(small, budget, time_limit=5, earlier=[first])
    _check(second)
    assert second.cost <= solve(small, budget, time_limit=5).cost * (1 + max(1e-4, first.gap) + 1e-9)
    if budget < small.keep_all_peak:
        assert solves[-1]["time_limit"] == planning.DERIVE_SECONDS
        assert second.origin == "another size"


def test_a_larger_batch_begins_with_the_plan_before_and_gets_all_the_time(solves: list[dict]) -> None:
    small, large = _problem(8), _problem(9)
    budget = _between(large, 0.2)
    first = plan(small, budget, time_limit=5)
    second = plan(large, budget, time_limit=5, earlier=[first])
    _check(second)
    assert (solves[-1]["time_limit"], solves[-1]["start"]) == (5, first)
    assert second.cost <= solve(large, budget, time_limit=5).cost * (1 + 1e-4)


def test_a_plan_on_disk_for_another_batch_is_a_start_and_takes_no_time_away(solves: list[dict]) -> None:
    plan(_problem(8), _between(_problem(8)), time_limit=5)
    found = plan(_problem(6), _between(_problem(6)), time_limit=5)
    _check(found)
    assert solves[-1]["time_limit"] == 5
    assert found.origin == "another size"


def test_what_plain_planning_finds_is_found_where_adapting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = _problem(8), _problem(7)
    budget = _between(large, 0.2)
    first = plan(large, budget, time_limit=5)

    def fails(problem: Problem, budget: int, **options: object) -> Solution:
        if "start" in options:
            return Solution(Status.NOT_FOUND, problem, budget, "auto")
        return attempt(problem, budget, **options)

    monkeypatch.setattr(planning, "attempt", fails)
    _check(plan(small, budget, time_limit=5, earlier=[first]))


def test_no_plan_is_no_plan_and_is_not_kept() -> None:
    problem = _problem()
    solution = plan(problem, 10, time_limit=1)
    assert solution.status is Status.INFEASIBLE
    assert solution.refusal.min_budget > 10
    with files.rows(plan_cache.TABLE) as kept:
        assert kept.beginning("") == {}


def test_a_hostile_plan_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    """Signed, and for the right question, but beyond the budget, or for more than a pinned op may run."""
    problem = dags.gpt(2)
    budget = _between(problem, 0.3)
    pinned = next(k for k, op in enumerate(problem.graph.ops) if op.pinned)
    good = solve(problem, budget, time_limit=2)
    for again in ((), ((pinned + 3, pinned),)):
        record = replace(Record.of(good, "auto", 100.0), again=again, bound=good.cost)
        question = record.question
        _drop(question)
        store(record)
        solution = plan(dags.gpt(2), budget, time_limit=2)
        _check(solution)
        assert "breaks the rules or the budget" in caplog.text
        assert solution.gap > 0 or solution.status is Status.OPTIMAL
        caplog.clear()
    elsewhere = replace(record, question=replace(question, budget=budget + 1))
    _drop(question)
    store(elsewhere)
    _check(plan(dags.gpt(2), budget, time_limit=2))


def _drop(question: Question) -> None:
    with files.rows(plan_cache.TABLE, write=True) as kept:
        kept.drop([question.key])


def test_a_damaged_record_is_planned_anew_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    problem = _problem()
    budget = _between(problem)
    first = plan(problem, budget, time_limit=5)
    key = Question.of(problem, budget, "auto").key
    with files.rows(plan_cache.TABLE, write=True) as kept:
        kept.put({key: {**kept.get([key])[key], "ops": "many"}})
    again = plan(_problem(), budget, time_limit=5)
    assert "A plan on disk is refused" in caplog.text
    assert again.cost == pytest.approx(first.cost)
    assert lookup(Question.of(problem, budget, "auto")) is not None


def test_an_interrupted_plan_is_kept_as_one_of_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dags.gpt(2)
    budget = _between(problem, 0.1)

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("checkmate.solvers.linear.highs.run", interrupted)
        first = plan(problem, budget, time_limit=20)
    assert first.interrupted
    record = lookup(Question.of(problem, budget, "auto"))
    assert record is not None
    assert record.time_limit < 19
    assert plan(dags.gpt(2), budget, time_limit=4).cost <= first.cost
