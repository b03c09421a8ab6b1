"""Why a peak is what it is: what is held, what dropping it costs by doing it, what memory is worth by brute force."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate import Problem
from checkmate.core import simulator
from checkmate.core.plan import Free, Plan, Run
from checkmate.core.problem import Profile
from checkmate.look import peak as peaks
from checkmate.look.peak import Remaking, explain_peak
from checkmate.look.timeline import timeline
from tests.look.test_timeline import _chain
from tests.solvers.checks import by
from tests.support import oracle
from tests.support.by_hand import solution_of
from tests.support.sampling import in_turn, long

next_use = by("next-use")


def test_the_table_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of it, where an op runs again, is in the golden answers."""
    monkeypatch.setattr(peaks, "solve", None)  # which only prices need
    peak = explain_peak(solution_of(_chain(), budget=150), prices=False)
    assert [(row.name, row.role) for row in peak] == [("vd", "results"), ("vc", "gradients"), ("va", "activations")]
    assert (peak[2].made_by, peak[2].module, peak[2].line) == ("a", "net.0", "net.py:1")
    assert sum(row.bytes for row in peak) + sum(peak.resident.values()) == peak.peak
    assert peak.prices == ()
    assert "any schedule" not in repr(peak) + peak._repr_html_()
    assert len(peak.records()) == len(peak) == 3
    if importlib.util.find_spec("pandas"):
        assert list(peak.to_pandas()["name"]) == ["vd", "vc", "va"]


def test_what_is_needed_later_says_by_whom_when_and_what_dropping_it_costs() -> None:
    problem = dags.unit_chain(4)  # op 5 is the first of the backward: it reads the values of ops 3 and 4
    peak = explain_peak(solution_of(problem), prices=False)
    assert peak.moment.name == "op5"
    assert [(row.name, row.next_op, row.next_in, row.drop_seconds, row.why_not) for row in peak] == [
        ("v0", "op8", 2.0, 1.0, ""),
        ("v1", "op7", 1.0, 1.0, ""),
        ("v2", "op6", 0.0, 1.0, ""),
        ("v3", "", None, None, "read here"),
        ("v4", "", None, None, "read here"),
        ("v5", "op6", 0.0, None, "made here"),
    ]


def _overwritten(by: int) -> Problem:
    """Op 0 may run again before what it reads is overwritten, not after that; op 1 may always."""
    deps = [[], [0], [], [0, 1], [3]]
    return Problem.from_dag(deps, [1] * 5, [4, 4, 0, 1, 1], workspace=[0, 0, 9, 0, 0], overwrites={by: [0]})


def test_what_cannot_be_dropped_says_why() -> None:
    draws = oracle.pinned(Problem.from_dag([[], [0], [1], [2], [1, 3]], [1] * 5, [4, 4, 9, 9, 1], outputs=[0, 4]), 1)
    there = {"v3": "made here", "v2": "read here", "v0": "a result of the step"}
    for problem, reasons in (
        (_overwritten(2), {"v0": "op0 reads what op2 has overwritten by then", "v1": "", "v2": "made here"}),
        (_overwritten(4), {"v0": "", "v1": "", "v2": "made here"}),
        (draws, {**there, "v1": "op1 draws random numbers"}),
    ):
        assert {row.name: row.why_not for row in explain_peak(solution_of(problem), prices=False)} == reasons


def test_what_is_written_over_is_at_hand_for_the_op_that_does_so() -> None:
    """Dropped at op 2, v1 is made again for op 3 from v0, over which op 3 writes."""
    problem = Problem.from_dag([[], [0], [], [0, 1, 2]], [1] * 4, [4] * 4, workspace=[0, 0, 9, 0], over={3: [0]})
    rows = {row.name: row for row in explain_peak(solution_of(problem), prices=False)}
    assert (rows["v1"].next_op, rows["v1"].drop_seconds) == ("op3", 1.0)


def _dropped(solution: Any, row: Any) -> Plan:
    """The plan that does without the value at the peak: it is freed after its last use before, and made again after."""
    line, graph = timeline(solution.plan, solution.problem), solution.problem.graph
    (span,) = [span for span in line.alive(line.peak_moment.index) if span.value == row.value]
    use, peak = span.next_use(line.peak_moment.index), line.peak_moment.index
    remake = Remaking(solution, line)
    ops = sorted(remake.ops(span.value, use))
    passing = [v for k in ops for v in graph.ops[k].outputs if v != span.value and not remake.at_hand(v, use)]
    last = max([span.first, *(u for u in span.uses if u < peak)])
    steps: list[Any] = []
    boundary, runs = solution.plan.boundary, -1
    for i, step in enumerate(solution.plan.steps):
        boundary = len(steps) if i == solution.plan.boundary else boundary
        if isinstance(step, Run):
            runs += 1
            if runs == use:
                steps += [*map(Run, ops), *map(Free, passing)]
        steps.append(step)
        if isinstance(step, Run) and runs == last:
            steps.append(Free(span.value))
    return Plan(tuple(steps), boundary)


DRAWN = [(partial(oracle.random_problem, most_ops=7), seed, 1.0, 0) for seed in range(12)]
DRAWN += [(partial(oracle.random_problem_with_ways, most_ops=9), seed, 1.2, 0) for seed in range(12)]
STEPS = [(dags.unit_chain, 12, 0.6, 4)]
STEPS += [long((partial(dags.unet, wide=8), 2, 0.8, 4)), long((dags.gpt, 1, 0.8, 4))]


@in_turn(of=DRAWN + STEPS)
def test_dropping_a_value_costs_what_is_said(of: tuple[Callable[[int], Problem], int, float, int]) -> None:
    """Done to the plan: it stays valid, costs so much more, and has so many bytes less at the op of the peak."""
    make, about, share, least = of
    problem = make(about)
    solution: Any = next_use(problem, int(share * problem.keep_all_peak))
    peak = explain_peak(solution, prices=False)
    before = sum(row.bytes for row in peak) + sum(peak.resident.values()) + peak.moment.workspace
    assert before == peak.peak == solution.peak
    droppable = [row for row in peak if row.drop_seconds is not None and row.next_op]
    assert len(droppable) >= least
    for row in droppable:
        plan = _dropped(solution, row)
        assert simulator.check_plan(plan, problem) == []
        assert simulator.cost(plan, problem) == pytest.approx(solution.cost + row.drop_seconds)
        assert simulator.simulate(plan, problem).bytes_at[peak.moment.index] == peak.peak - row.bytes


def test_prices_of_the_chain_whose_optima_are_known() -> None:
    peak = explain_peak(checkmate.solve(dags.unit_chain(8), 4), step=1)
    less, more = peak.prices
    assert (less.budget, less.cost, less.bound, less.found_change, less.proven_change) == (3, 45, 45, 19, 19)
    assert (more.budget, more.cost, more.bound, more.found_change, more.proven_change) == (5, 22, 22, -4, -4)


@in_turn(seed=[1, *map(long, (0, 2, 3))])
def test_prices_are_those_of_brute_force(seed: int) -> None:
    problem = oracle.random_problem(seed)
    known = oracle.outcomes(problem)
    for budget in oracle.interesting_budgets(known)[:-1]:
        solution = checkmate.solve(problem, budget)
        for price in explain_peak(solution, step=1).prices:
            best = oracle.optimum(known, price.budget)
            assert price.cost == pytest.approx(best)
            assert price.proven_change == pytest.approx(best - solution.cost)


def test_a_plan_that_is_not_the_best_is_told_so() -> None:
    """Running an op for nothing: even with less memory a faster plan is known, and the change is negative."""
    solution = solution_of(dags.unit_chain(4), (2, 0), (3, 0), budget=9)
    peak = explain_peak(solution, step=1)
    less, _ = peak.prices
    assert less.found_change < 0
    assert less.found_change >= less.proven_change
    assert (peak.better.cost, peak.better.budget) == (9.0, 9)  # each of the nine ops once
    assert peak.better.peak <= solution.budget
    for text in (repr(peak), peak._repr_html_()):
        assert "a better plan for the same budget was found: a step of 9.0 s, 2.0 s less" in text
    best = explain_peak(checkmate.solve(dags.unit_chain(4), 9), step=1)
    assert best.better is None
    assert "better plan" not in repr(best) + best._repr_html_()


def test_a_plan_of_the_step_split_further_is_no_better_plan_of_this_one() -> None:
    problem = dags.unit_chain(4)
    split = replace(problem, splits=("op8 in 2 parts",))
    split = replace(split, profile=replace(split.profile, seconds=split.seconds / 4))
    least = checkmate.min_budget(problem).peak
    solution = checkmate.solve(replace(problem, next_split=lambda: split), least)
    assert solution.problem.splits == ()
    smaller = replace(solution, problem=replace(solution.problem, next_split=lambda: split))
    answers = [checkmate.solve(split, least)]
    assert answers[0].cost < solution.cost
    assert peaks._better(smaller, answers) is None


def test_the_step_is_a_hundredth_of_the_peak_or_100_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, problem = [], dags.unit_chain(2)
    monkeypatch.setattr(peaks, "_price", lambda solution, budget, *_: (asked.append(budget), solution))
    for resident, step in ((0, 1), (1000, 10), (10**11, 10**8)):
        profile = replace(problem.profile, resident_bytes=resident)
        solution = solution_of(replace(problem, profile=profile), budget=10**12)
        asked.clear()
        explain_peak(solution)
        assert asked == [solution.peak - step, solution.budget + step]


def test_a_peak_at_a_rematerialization_says_so() -> None:
    problem = dags.unit_chain(2)
    fat = replace(problem, profile=Profile(problem.seconds, np.array([9, 0, 0, 0, 0])))
    solution = solution_of(fat, (4, 0), (3, 0))
    peak = explain_peak(solution, prices=False)
    assert (peak.moment.name, peak.moment.time) == ("op0", 1)
    assert "op0, run for the 2nd time, in the backward." in repr(peak)
    assert "workspace  9 B of op" in repr(peak)


def test_what_the_op_at_the_peak_is_written_over_is_said() -> None:
    """Op 3 reads what ops 1 and 2 made, and could be written over either; op 4 reads that of op 1 yet."""
    problem = Problem.from_dag(
        [[], [0], [1], [1, 2], [1, 3]], [1] * 5, [4, 64, 64, 64, 4], workspace=[0, 0, 0, 40, 0], over={3: [1, 2]}
    )
    peak = explain_peak(solution_of(problem), prices=False)
    assert (peak.peak, peak.moment.over) == (64 + 64 + 40, "v2")
    assert peak.not_over == "v1, which op4 reads later: op3 could be written over it, and take 64 B less"
    assert [(row.name, row.why_not) for row in peak] == [("v1", "read here"), ("v3", "made here, over v2")]
    assert "in place   op3 is written over v2" in repr(peak)


def test_html_is_escaped() -> None:
    problem = _chain()
    marked = tuple(replace(op, where="<b>") for op in problem.graph.ops)
    marked = replace(problem, graph=replace(problem.graph, ops=marked), profile=replace(problem.profile, source="<b>"))
    kept, again = solution_of(marked), solution_of(marked, (3, 0))
    for answer in (explain_peak(kept, prices=False), checkmate.diff(kept, again), checkmate.costs(marked)):
        assert "&lt;b&gt;" in answer._repr_html_()
        assert "<b>" not in answer._repr_html_()


def test_what_cannot_be_explained_is_refused() -> None:
    solution = solution_of(_chain())
    for given, options, says in (
        (checkmate.solve(dags.unit_chain(4), 1), {}, "There is no plan to explain: No schedule fits 1 B"),
        (solution, {"step": 0}, "positive number of bytes, not 0"),
        (solution, {"time_limit": 0}, "time_limit"),
        (solution, {"top": -1}, "top is a number of rows, not -1"),
    ):
        with pytest.raises(ValueError, match=says):
            explain_peak(given, **options)
