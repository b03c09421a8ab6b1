"""Plans on disk: what is read is what was written, or nothing; a file can not run, lie about bytes or hang."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import InvalidProblem
from checkmate.core import files
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Solution
from checkmate.solvers import plan_cache
from checkmate.solvers.plan_cache import Question, Record, as_document, from_document, lookup, relatives, store
from checkmate.solvers.solve import min_budget, solve

PROBLEM = dags.resnet((1, 1, 1, 1))
BUDGET = (min_budget(PROBLEM, time_limit=2).peak + PROBLEM.keep_all_peak) // 2
SOLUTION = solve(PROBLEM, BUDGET, time_limit=3)
QUESTION = Question.of(PROBLEM, BUDGET, "auto")
RECORD = Record.of(SOLUTION, "auto", 3.0)
assert SOLUTION.schedule is not None
R = SOLUTION.schedule.R


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "cache"))


def test_what_is_stored_is_found_exactly() -> None:
    assert lookup(QUESTION) is None
    store(RECORD)
    found = lookup(QUESTION)
    assert found == RECORD
    assert found is not None
    assert np.array_equal(found.runs(), R)
    again = found.certified(PROBLEM, BUDGET)
    assert again is not None
    assert (again.cost, again.bound, again.peak, again.method) == (
        SOLUTION.cost,
        SOLUTION.bound,
        SOLUTION.peak,
        SOLUTION.method,
    )


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
    seconds = PROBLEM.seconds.copy()
    seconds[-1] *= 2
    dearer = Problem(PROBLEM.graph, Profile(seconds, PROBLEM.workspace, PROBLEM.resident))
    other = RECORD.certified(dearer, BUDGET)
    assert other is not None
    assert other.bound == dearer.keep_all_cost
    wider = RECORD.certified(PROBLEM, BUDGET + 1)
    assert wider is not None
    assert wider.bound == PROBLEM.keep_all_cost < SOLUTION.bound
    narrower = RECORD.certified(PROBLEM, SOLUTION.peak)
    assert narrower is not None
    assert narrower.bound == SOLUTION.bound
    assert RECORD.certified(PROBLEM, SOLUTION.peak - 1) is None


def test_of_two_answers_the_better_parts_are_kept() -> None:
    t, k = next((t, k) for t, k in np.argwhere(np.tril(~R, -1)) if PROBLEM.graph.ops[k].pinned is None)
    worse = replace(RECORD, again=(*RECORD.again, (int(t), int(k))), cost=RECORD.cost * 1.1, time_limit=9.0)
    looser = replace(RECORD, bound=RECORD.bound / 2)
    for record in (worse, looser):
        store(record)
    assert lookup(QUESTION) == replace(RECORD, time_limit=9.0)


def _keep(question: Question, document: object) -> None:
    """Have the row of a question say something else."""
    with files.rows(plan_cache.TABLE, write=True) as kept:
        kept.put({question.key: document})


T = len(PROBLEM.graph.ops)
WRONG: dict[str, object] = {
    "time_limit": [-1.0, "1", 1, None, 1e400],
    "cost": [-1.0, True],
    "bound": [RECORD.cost * 1.01, -1.0, [1.0]],
    "keep_all_peak": [0, 1.5, True, 2**60],
    "ops": [0, -1, 2.0, 2**53 + 1],
    "by": [3, None],
    "again": [None, {}, "ab", [[1]], [[1, 2]], [[2, 1, 0]], [[1, -1]], [[T, 0]], [[1.0, 0.0]], [[True, False]], [7]],
    "question": [None, [], {}, {"structure": "a"}, 3],
    "more": [1],
    "__class__": ["os.system"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_is_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidProblem):
        from_document({**as_document(RECORD), name: value}, "it")


@pytest.mark.parametrize(("name", "value"), [("resident", -1), ("budget", 1.0), ("structure", 3), ("more", 1)])
def test_a_question_that_is_none_is_refused(name: str, value: object) -> None:
    document = as_document(RECORD)
    with pytest.raises(InvalidProblem):
        from_document({**document, "question": {**document["question"], name: value}}, "it")


@pytest.mark.parametrize("document", [[], None, {}, {"question": {}}, {**as_document(RECORD), "cost": -1.0}])
def test_a_damaged_record_is_refused_with_a_warning_and_replaced(
    document: object, caplog: pytest.LogCaptureFixture
) -> None:
    _keep(QUESTION, document)
    assert lookup(QUESTION) is None
    assert "A plan on disk is refused" in caplog.text
    assert relatives(replace(QUESTION, budget=BUDGET + 1)) == []
    store(RECORD)
    assert lookup(QUESTION) == RECORD


def test_a_record_in_another_row_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    other = replace(QUESTION, budget=BUDGET * 2)
    _keep(other, as_document(RECORD))
    assert lookup(other) is None
    assert "answers another question" in caplog.text


def test_a_plan_that_breaks_a_rule_or_is_of_another_graph_is_none() -> None:
    pinned = next(k for k, op in enumerate(dags.gpt(1).graph.ops) if op.pinned)
    gpt = dags.gpt(1)
    record = replace(RECORD, ops=len(gpt.graph.ops), again=((pinned + 5, pinned),))
    assert record.certified(gpt, 2**50) is None
    assert record.schedule(gpt) is None
    assert RECORD.certified(gpt, 2**50) is None
    assert RECORD.schedule(gpt) is None
    assert RECORD.schedule(PROBLEM) is not None


def test_where_nothing_can_be_written_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "file"))
    store(RECORD)
    assert "not kept for the next time" in caplog.text
    assert lookup(QUESTION) is None
    assert relatives(QUESTION) == []


def test_what_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    questions = [replace(QUESTION, budget=BUDGET + i) for i in range(4)]
    for question in questions[:3]:
        store(replace(RECORD, question=question))
    plan_cache.used(questions[0])
    store(replace(RECORD, question=questions[3]))
    assert [lookup(q) is not None for q in questions] == [True, False, True, True]


def test_the_bytes_on_disk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_BYTES", int(2.5 * len(json.dumps(as_document(RECORD)))))
    questions = [replace(QUESTION, budget=BUDGET + i) for i in range(6)]
    for question in questions:
        store(replace(RECORD, question=question))
    assert [lookup(q) is not None for q in questions] == [False] * 4 + [True] * 2


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


def test_a_solution_without_recomputation_is_kept_too() -> None:
    solution: Solution = solve(PROBLEM, PROBLEM.keep_all_peak)
    record = Record.of(solution, "auto", 1.0)
    store(record)
    assert lookup(record.question) == record
    assert record.again == ()
    assert np.array_equal(record.runs(), np.eye(T, dtype=bool))
