"""Ops that write over an input that dies at them: what plans, counts and files say of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints, same_ops
from checkmate.core.inplace import InPlace
from checkmate.core.plan import Free, Plan, Run
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.errors import InvalidProblem
from tests.support.by_hand import plan_of, random_schedule, solution_of
from tests.support.oracle import random_problem_with_ways
from tests.support.paper_equations import peak

CHAIN = Problem.from_dag(
    [[], [0], [1], [0, 2]], [1] * 4, [8, 8, 8, 8], workspace=[0, 0, 1, 0], over={2: [1], 3: [0, 2]}
)


def _slowly(problem: Problem) -> Problem:
    ways = tuple(replace(way, slower=True) for way in problem.profile.ways)
    return replace(problem, profile=replace(problem.profile, ways=ways))


def _plainly(problem: Problem) -> Problem:
    return replace(problem, profile=replace(problem.profile, ways=()))


def test_what_goes_with_a_run_is_written_over() -> None:
    plan = plan_of(CHAIN)
    assert plan.steps == (Run(0), Run(1), Run(2, over=1), Run(3, over=0), Free(2))
    assert simulator.check_plan(plan, CHAIN) == []
    assert simulator.simulate(plan, CHAIN).bytes_at == (8, 16, 17, 16)
    assert CHAIN.live_bytes.tolist() == [8, 16, 17, 16]
    at_hand = Schedule.of_plan(CHAIN.graph, plan).S  # where each stage begins: op 2 has written over v1
    assert [[v for v in range(4) if row[v]] for row in at_hand] == [[], [0], [0, 1], [0, 2]]
    chain = Problem.from_dag([[], [0], [1], [1, 2]], [1] * 4, [8] * 4, over={2: [1]})
    assert Run(2) in plan_of(chain).steps  # what is still needed is not
    assert Run(2, over=1) in plan_of(chain, (3, 1)).steps  # op 1 runs again before it is needed
    ways = (InPlace(3, 3, 0, 9), InPlace(3, 3, 2, 3))
    problem = replace(CHAIN, profile=replace(CHAIN.profile, ways=ways))
    assert problem.savings[3] == ((2, 5),)  # the other one takes more than it saves
    assert Run(3, over=2) in plan_of(problem).steps


def test_each_fault_is_found() -> None:
    for steps, says in (
        ((Run(0), Run(1), Run(2, over=1), Run(3, over=1), Free(2)), "step 3 runs op3 over v1, which no way of it does"),
        ((Run(0), Run(1), Run(2, over=1), Free(1), Run(3, over=0)), "step 3 frees v1, which is not at hand"),
        ((Run(0), Run(1, over=0), Run(2, over=1), Run(3)), "step 3 runs op3 without its input v0"),
    ):
        assert says in simulator.check_plan(Plan(steps, len(steps)), CHAIN)


def test_a_way_that_is_none_is_refused() -> None:
    problem = Problem.from_dag([[], [0], [1], [2]], [1] * 4, [8, 4, 4, 4], outputs=[2, 3])
    for way, says in (
        (InPlace(9, 2, 1, 0), "an op that is not there"),
        (InPlace(2, 1, 1, 0), "not both are its own"),
        (InPlace(2, 2, 0, 0), "not both are its own"),
        (InPlace(2, 2, 1, -1), "no indices or bytes"),
        (InPlace(1, 1, 0, 0), "they have 4 and 8 bytes"),
        (InPlace(3, 3, 2, 0), "a result of the step"),
    ):
        with pytest.raises(InvalidProblem, match=says):
            replace(problem, profile=replace(problem.profile, ways=(way,)))


def test_ways_travel_in_files_and_count_as_sizes(tmp_path: Path) -> None:
    for problem in (_slowly(CHAIN), CHAIN):
        problem.to_json(tmp_path / "chain.json")
        read = Problem.from_json(tmp_path / "chain.json")
        assert read.profile.ways == problem.profile.ways
        assert fingerprints(read) == fingerprints(problem)
    assert "slower" not in (tmp_path / "chain.json").read_text()  # which files of before do not know
    assert same_ops(_plainly(CHAIN), CHAIN)
    assert fingerprints(_plainly(CHAIN)).sizes != fingerprints(CHAIN).sizes


@pytest.mark.parametrize(("budget", "over"), [(25, []), (24, [2]), (23, [2, 3]), (17, [2, 3])])
def test_slower_ways_are_taken_where_the_budget_needs_them(budget: int, over: list[int]) -> None:
    problem = _slowly(CHAIN)
    assert problem.keep_all_peak == 25  # plainly: what is fast there is
    plan = solution_of(problem, budget=budget).plan
    assert [step.op for step in plan.steps if isinstance(step, Run) and step.over is not None] == over


@given(st.integers(0, 10**6))
def test_of_slower_ways_just_those_are_taken_that_a_budget_needs(seed: int) -> None:
    problem = _slowly(random_problem_with_ways(seed, most_ops=9))
    schedule = random_schedule(problem, seed)
    whole = simulator.lower(problem, schedule)
    least, most = simulator.simulate(whole, problem).peak, peak(schedule, _plainly(problem))
    for budget in {least, (least + most) // 2, most}:
        plan = simulator.without_slower_ways(whole, problem, budget)
        assert simulator.check_plan(plan, problem, budget) == []
        assert plan.runs == whole.runs
        assert (plan.runs_over == 0) == (budget == most or whole.runs_over == 0)
        bytes_at = simulator.simulate(plan, problem).bytes_at
        runs = [step for step in plan.steps if isinstance(step, Run)]
        for step, at in zip(runs, bytes_at, strict=True):
            assert step.over is None or at + dict(problem.savings[step.op])[step.over] > budget
