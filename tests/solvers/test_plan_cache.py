"""Plans on disk: what is read is what was written, or nothing; what is known is used, and never believed."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem, Profile, Solution, Status, solve
from checkmate.core import files
from checkmate.core.solution import Query
from checkmate.errors import InvalidProblem
from checkmate.solvers import plan_cache
from checkmate.solvers.auto import Portfolio
from checkmate.solvers.plan_cache import Question, Record, as_document, from_document, lookup, relatives, store
from checkmate.solvers.solve import attempt, min_budget
from tests.solvers.checks import begun, check, runs, takes_less_than
from tests.support import offers
from tests.support.budgets import recomputing
from tests.support.offers import plan


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Note the queries of each solve."""
    noted = Mock(wraps=attempt)
    monkeypatch.setattr(offers, "attempt", noted)
    return noted


def _queries(solves: Mock) -> list[Query]:
    return [call.args[0] for call in solves.call_args_list]


def _problem(batch: int = 8) -> Problem:
    return dags.resnet((1, 1, 1, 1), batch=batch)


def _with_costs(problem: Problem, factor: float, ops: slice = slice(None, None, 2)) -> Problem:
    """The step with other seconds of some of its ops."""
    seconds = problem.seconds.copy()
    seconds[ops] *= factor
    return Problem(problem.graph, Profile(seconds, problem.workspace, problem.resident))


PROBLEM = _problem()
BUDGET = (min_budget(PROBLEM, time_limit=2).peak + PROBLEM.keep_all_peak) // 2
SOLUTION = solve(PROBLEM, BUDGET, time_limit=3)
QUESTION = Question.of(PROBLEM, BUDGET, "auto")
RECORD = Record.of(SOLUTION, "auto", 3.0)
R, T = SOLUTION.schedule.R, len(PROBLEM.graph.ops)


def test_the_second_time_nothing_is_solved(solves: Mock) -> None:
    """Every method has its own plans; without the cache all is anew."""
    first = plan(_problem(), BUDGET, seconds=5)
    with takes_less_than(1):
        again = plan(_problem(), BUDGET, seconds=5)
    assert solves.call_count == 1
    check(again)
    assert (again.origin, again.problem is first.problem) == ("plan cache", False)
    assert (again.cost, again.bound, again.peak, again.status) == (first.cost, first.bound, first.peak, first.status)
    for _ in range(2):
        assert plan(_problem(), BUDGET, method="next-use", seconds=1).method == "next-use"
    assert solves.call_count == 2
    plan(_problem(), BUDGET, seconds=5, cache=False)
    assert [query.start for query in _queries(solves)] == [None] * 3


def test_without_the_cache_nothing_is_written() -> None:
    """A plan that keeps everything is not written either."""
    plan(PROBLEM, BUDGET, seconds=5, cache=False)
    assert plan(PROBLEM, PROBLEM.keep_all_peak).status is Status.OPTIMAL
    assert not files.folder().exists()


def test_a_small_gap_is_worth_little_of_the_time(solves: Mock) -> None:
    found = plan(PROBLEM, BUDGET, seconds=5)
    assert [query.options["settle"] for query in _queries(solves)] == [plan_cache.WAVER]
    best = begun(PROBLEM, BUDGET, 100.0)
    search = Portfolio(best.task, best, settle=0.01, known=None)
    assert best.worth(search.settle) == 1.0  # there is no plan yet
    best.best, best.cost = found, 1.0
    for bound, share in ((0.9, 1.0), (0.99, 1.0), (0.995, 0.5), (0.999, 0.1)):
        best.bound = bound
        assert best.worth(search.settle) == pytest.approx(share)
    assert search.left < 10.0
    search.settle = 0.0
    assert best.worth(search.settle) == 1.0


def test_a_plan_with_a_gap_is_improved_when_there_is_more_time(solves: Mock) -> None:
    problem = dags.gpt(2)
    budget = recomputing(problem, 0.1)
    bad = solve(problem, budget, method="next-use", time_limit=0.1)
    store(Record.of(bad, "auto", 0.1))
    assert bad.gap > 0.01
    same = plan(dags.gpt(2), budget, seconds=0.1)
    assert (same.origin, same.cost, solves.call_count) == ("plan cache", bad.cost, 0)
    better = plan(dags.gpt(2), budget, seconds=3)
    assert better.origin == "less time"
    assert better.gap < bad.gap
    assert (plan(dags.gpt(2), budget, seconds=3).origin, solves.call_count) == ("plan cache", 1)


def test_other_costs_get_a_new_bound_and_the_old_is_not_claimed() -> None:
    first = plan(PROBLEM, BUDGET, seconds=5)
    cheaper, other = _with_costs(PROBLEM, 0.97), _with_costs(PROBLEM, 30.0)
    again = plan(cheaper, BUDGET, seconds=5)
    check(again)
    assert again.origin == "other costs"
    assert again.bound <= solve(cheaper, BUDGET, time_limit=5).cost < first.bound
    assert again.gap <= plan_cache.WAVER + 1e-4
    for both_are_kept in (_with_costs(PROBLEM, 0.97), _problem()):
        assert plan(both_are_kept, BUDGET, seconds=5).origin == "plan cache"
    # very different costs are planned for
    assert plan(other, BUDGET, seconds=5).cost <= solve(other, BUDGET, time_limit=5).cost * (1 + plan_cache.WAVER)


def test_a_few_resident_bytes_more_need_no_new_plan() -> None:
    """Other bytes that are allocated on a GPU vary from start to start."""
    first = plan(PROBLEM, BUDGET + 64, seconds=5)
    assert first.peak <= BUDGET
    more = Problem(PROBLEM.graph, replace(PROBLEM.profile, resident_bytes=PROBLEM.resident + 64))
    again = plan(more, BUDGET + 64, seconds=5)
    assert (again.cost, again.bound) == (first.cost, pytest.approx(first.bound))
    assert list(again.details["found"]) == ["start"]


@pytest.mark.parametrize("batch", [2, 5, 7])
def test_a_smaller_batch_is_planned_from_the_one_before_in_little_time(batch: int, solves: Mock) -> None:
    large, small = _problem(8), _problem(batch)
    budget = recomputing(large, 0.2)
    first = plan(large, budget, seconds=5)
    second = plan(small, budget, seconds=5, earlier=[first])
    check(second)
    assert second.cost <= solve(small, budget, time_limit=5).cost * (1 + max(1e-4, first.gap) + 1e-9)
    if budget < small.keep_all_peak:
        assert _queries(solves)[-1].seconds == plan_cache.DERIVE_SECONDS
        assert second.origin == "another size"


def test_a_smaller_batch_whose_ops_have_another_order_is_planned_from_the_one_before(solves: Mock) -> None:
    """Which gradients come last depends on their bytes."""
    large, small = _problem(8), _problem(7)
    ops, values = small.graph.ops, small.graph.values
    k = next(
        k for k in range(small.graph.forward_length + 1, T) if k - 1 not in {values[v].producer for v in ops[k].inputs}
    )
    order = [*range(k - 1), k, k - 1, *range(k + 1, T)]
    profile = Profile(small.seconds[order], small.workspace[order], small.resident)
    small = Problem(small.graph.in_order(order), profile)
    budget = recomputing(large, 0.2)
    first = plan(large, budget, seconds=5)
    second = plan(small, budget, seconds=5, earlier=[first])
    check(second)
    assert (second.origin, _queries(solves)[-1].seconds) == ("another size", plan_cache.DERIVE_SECONDS)
    start = _queries(solves)[-1].start
    assert np.array_equal(start.R.sum(axis=0), first.schedule.R.sum(axis=0)[order])


def test_a_larger_batch_begins_with_the_plan_before_and_gets_all_the_time(solves: Mock) -> None:
    small, large = _problem(8), _problem(9)
    budget = recomputing(large, 0.2)
    first = plan(small, budget, seconds=5)
    second = plan(large, budget, seconds=5, earlier=[first])
    check(second)
    assert (_queries(solves)[-1].seconds, _queries(solves)[-1].start) == (5, first)
    assert second.cost <= solve(large, budget, time_limit=5).cost * (1 + 1e-4)


def test_a_plan_on_disk_for_another_batch_is_a_start_and_takes_no_time_away(solves: Mock) -> None:
    for batch in (8, 6):
        found = plan(_problem(batch), recomputing(_problem(batch), 0.4), seconds=5)
    check(found)
    assert (_queries(solves)[-1].seconds, found.origin) == (5, "another size")


def test_what_plain_planning_finds_is_found_where_adapting_fails() -> None:
    large, small = _problem(8), _problem(7)
    budget = recomputing(large, 0.2)
    first = plan(large, budget, seconds=5)

    def fails(query: Query) -> Solution:
        return attempt(query) if query.start is None else Solution(Status.NOT_FOUND, small, budget, "auto")

    check(plan(small, budget, seconds=5, earlier=[first], solver=fails))


def test_no_plan_is_no_plan_and_is_not_kept() -> None:
    solution = plan(PROBLEM, 10, seconds=1)
    assert solution.status is Status.INFEASIBLE
    assert solution.refusal.min_budget > 10
    with files.rows(plan_cache.TABLE) as kept:
        assert kept.beginning("") == {}


def test_where_no_plan_is_found_it_is_looked_for_five_times_as_long_each_time() -> None:
    seconds: list[float] = []

    def fails(query: Query) -> Solution:
        seconds.append(query.seconds)
        return Solution(Status.NOT_FOUND, query.problem, query.budget, "auto")

    plan(PROBLEM, BUDGET, cache=False, wait=0.5, solver=fails)
    assert seconds == [0.5, 2.5, 12.5, 60]


def test_a_hostile_plan_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    """Signed, and for the right question, but beyond the budget, or for more than a pinned op may run."""
    problem = dags.gpt(2)
    budget = recomputing(problem, 0.3)
    pinned = next(k for k, op in enumerate(problem.graph.ops) if op.pinned)
    good = solve(problem, budget, time_limit=2)
    for again in ((), ((pinned + 3, pinned),)):
        record = replace(Record.of(good, "auto", 100.0), again=again, bound=good.cost)
        _keep(record.question, None)
        store(record)
        solution = plan(dags.gpt(2), budget, seconds=2)
        check(solution)
        assert "breaks the rules or the budget" in caplog.text
        assert solution.gap > 0 or solution.status is Status.OPTIMAL
        caplog.clear()
    _keep(record.question, None)
    store(replace(record, question=replace(record.question, budget=budget + 1)))
    check(plan(dags.gpt(2), budget, seconds=2))


def test_an_interrupted_plan_is_kept_as_one_of_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dags.gpt(2)
    budget = recomputing(problem, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr("checkmate.solvers.linear.highs.run", Mock(side_effect=KeyboardInterrupt))
        first = plan(problem, budget, seconds=20)
    assert first.interrupted
    assert lookup(Question.of(problem, budget, "auto")).time_limit < 19
    assert plan(dags.gpt(2), budget, seconds=4).cost <= first.cost


def test_what_is_stored_is_found_exactly() -> None:
    assert lookup(QUESTION) is None
    store(RECORD)
    found = lookup(QUESTION)
    assert found == RECORD
    assert np.array_equal(found.runs(), R)
    again = found.certified(PROBLEM, BUDGET)
    assert all(getattr(again, name) == getattr(SOLUTION, name) for name in ("cost", "bound", "peak", "method"))
    record = Record.of(solve(PROBLEM, PROBLEM.keep_all_peak), "auto", 1.0)  # without recomputation
    store(record)
    assert lookup(record.question) == record
    assert record.again == ()
    assert np.array_equal(record.runs(), runs(PROBLEM))


@pytest.mark.parametrize(
    "other",
    [{"budget": BUDGET + 1}, {"method": "milp"}, {"resident": 1}, {"source": "elsewhere"}, {"checkmate": "0.0.1"}]
    + [{name: "0" * 64} for name in ("structure", "sizes", "costs")],
)
def test_another_question_has_no_answer(other: dict[str, Any]) -> None:
    store(RECORD)
    assert lookup(replace(QUESTION, **other)) is None


def test_plans_of_the_same_ops_are_found_those_of_the_same_sizes_first() -> None:
    for sizes, costs in (("a" * 64, "a" * 64), (QUESTION.sizes, "b" * 64), (QUESTION.sizes, QUESTION.costs)):
        store(replace(RECORD, question=replace(QUESTION, sizes=sizes, costs=costs)))
    store(replace(RECORD, question=replace(QUESTION, structure="c" * 64)))
    found = [record.question for record in relatives(QUESTION)]
    assert [(q.sizes, q.costs[0]) for q in found] == [(QUESTION.sizes, "b"), ("a" * 64, "a")]


def test_a_bound_is_claimed_for_what_it_was_proven_for_only() -> None:
    dearer = _with_costs(PROBLEM, 2, slice(-1, None))
    assert RECORD.certified(dearer, BUDGET).bound == dearer.keep_all_cost
    assert RECORD.certified(PROBLEM, BUDGET + 1).bound == PROBLEM.keep_all_cost < SOLUTION.bound
    assert RECORD.certified(PROBLEM, SOLUTION.peak).bound == SOLUTION.bound
    assert RECORD.certified(PROBLEM, SOLUTION.peak - 1) is None


def test_of_two_answers_the_better_parts_are_kept() -> None:
    t, k = next((t, k) for t, k in np.argwhere(np.tril(~R, -1)) if PROBLEM.graph.ops[k].pinned is None)
    worse = replace(RECORD, again=(*RECORD.again, (int(t), int(k))), cost=RECORD.cost * 1.1, time_limit=9.0)
    looser = replace(RECORD, bound=RECORD.bound / 2)
    store(worse)
    store(looser)
    assert lookup(QUESTION) == replace(RECORD, time_limit=9.0)


def test_the_room_is_what_the_resident_bytes_leave_and_a_gap_meets_itself() -> None:
    assert replace(QUESTION, budget=10, resident=4).room == 6
    record = replace(RECORD, cost=8.0, bound=6.0, time_limit=5.0)
    assert [record.meets(seconds, gap) for seconds, gap in ((6.0, 0.25), (5.0, 0.1), (6.0, 0.1))] == [True, True, False]


def _keep(question: Question, document: object) -> None:
    """Have the row of a question say something else; it is damaged, or none."""
    with files.rows(plan_cache.TABLE, write=True) as kept:
        kept.put({question.key: document})


WRONG: dict[str, object] = {
    "time_limit": [-1.0, "1", None, 1e400, float("nan")],
    "cost": [-1.0],
    "bound": [RECORD.cost * 1.01, -1.0, [1.0]],
    "keep_all_peak": [0, None],
    "ops": [0, -1, None],
    "again": [None, "ab", [[1]], [[1, 2]], [[2, 1, 0]], [[1, -1]], [[T, 0]], [7]],
    "question": [None, [], {}, {"structure": "a"}, 3],
    "more": [1],
    "__class__": ["os.system"],
    "question.resident": [-1],
    "question.budget": ["1"],
    "question.more": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_is_out_of_range_is_refused(name: str, value: object) -> None:
    document = as_document(RECORD)
    if name.startswith("question."):
        name, value = "question", {**document["question"], name.removeprefix("question."): value}
    with pytest.raises(InvalidProblem):
        from_document({**document, name: value}, "it")


@pytest.mark.parametrize("document", [[], None, {}, {"question": {}}, {**as_document(RECORD), "cost": -1.0}])
def test_a_damaged_record_is_refused_aloud_and_replaced(document: object, caplog: pytest.LogCaptureFixture) -> None:
    """A record that answers another question is refused, too."""
    _keep(QUESTION, document)
    assert lookup(QUESTION) is None
    assert "A plan on disk is refused" in caplog.text
    assert relatives(replace(QUESTION, budget=BUDGET + 1)) == []
    store(RECORD)
    assert lookup(QUESTION) == RECORD
    other = replace(QUESTION, budget=BUDGET * 2)
    _keep(other, as_document(RECORD))
    assert lookup(other) is None
    assert "answers another question" in caplog.text


def test_a_plan_that_breaks_a_rule_or_is_of_another_graph_is_none() -> None:
    gpt = dags.gpt(1)
    pinned = next(k for k, op in enumerate(gpt.graph.ops) if op.pinned)
    for record in (replace(RECORD, ops=len(gpt.graph.ops), again=((pinned + 5, pinned),)), RECORD):
        assert record.certified(gpt, 2**50) is record.schedule(gpt) is None
    assert RECORD.schedule(PROBLEM) is not None


def test_where_nothing_can_be_written_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "file"))
    store(RECORD)
    assert "not kept for the next time" in caplog.text
    assert (lookup(QUESTION), relatives(QUESTION)) == (None, [])


def test_what_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans go where there are too many of them, or too many bytes."""
    records = [replace(RECORD, question=replace(QUESTION, budget=BUDGET + i)) for i in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(plan_cache, "MOST_PLANS", 3)
        for record in records[:3]:
            store(record)
        plan_cache.used(records[0].question)
        store(records[3])
        assert [lookup(record.question) is not None for record in records[:4]] == [True, False, True, True]
    monkeypatch.setattr(plan_cache, "MOST_BYTES", int(2.5 * len(json.dumps(as_document(RECORD)))))
    for record in records[4:]:
        store(record)
    assert [lookup(record.question) is not None for record in records] == [False] * 6 + [True] * 2


def _store_and_read(number: int) -> None:
    for i in range(8):
        question = replace(QUESTION, budget=BUDGET + i % 3)
        store(replace(RECORD, question=question, time_limit=float(number)))
        assert lookup(question) is not None


def test_many_processes_read_and_write_at_once(caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_store_and_read, args=(number,)) for number in range(1, 6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert lookup(QUESTION) == replace(RECORD, time_limit=5.0)
    assert caplog.text == ""
