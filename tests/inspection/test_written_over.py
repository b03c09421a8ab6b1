"""What is said of runs that write over an input, in a terminal, as JSON and in pictures; plain problems say nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import checkmate
from checkmate import Problem
from checkmate.cli.json_output import solution_record, steps_of
from checkmate.inspection.explanation import Explanation, pinned_ops
from tests.inspection.test_peak import _by_hand

PROBLEM = Problem.from_dag(
    [[], [0], [1], [2], [1, 3]], [1.0] * 5, [8, 64, 64, 64, 8], workspace=[0, 0, 0, 100, 0],
    over={2: [1], 3: [2]}, forward=3,
)  # fmt: skip
PLAIN = replace(PROBLEM, profile=replace(PROBLEM.profile, ways=()))


def _explained(problem: Problem) -> Explanation:
    return Explanation(pinned_ops(problem), (), "", problem, checkmate.min_budget(problem))


def test_a_solution_counts_them() -> None:
    solution = _by_hand(PROBLEM, (4, 1))  # op 1 runs again, so that its first value may go
    assert "  in place   2 of 6 runs write over an input" in str(solution).splitlines()
    assert "in place" not in str(_by_hand(PLAIN, (4, 1)))
    assert "5 values, 2 ops in place, keep_all" in repr(PROBLEM)
    assert "in place" not in repr(PLAIN)


def test_a_difference_counts_those_of_both() -> None:
    found = checkmate.diff(_by_hand(PROBLEM), _by_hand(PROBLEM, (4, 1)))
    assert "1 to 2 runs write over an input" in repr(found)
    assert "write over" not in repr(checkmate.diff(_by_hand(PLAIN), _by_hand(PLAIN, (4, 1))))


def test_json_names_what_is_written_over() -> None:
    solution = _by_hand(PROBLEM, (4, 1))
    steps = steps_of(solution)
    assert {"run": "op2", "over": "v1"} in steps
    assert {"run": "op3", "over": "v2"} in steps
    assert sum("over" in step for step in steps) == solution_record(solution)["runs_over"] == 2
    assert solution_record(_by_hand(PLAIN))["runs_over"] == 0


def test_costs_name_what_an_op_can_be_written_over() -> None:
    costs = checkmate.profile(PROBLEM)
    assert [(row.over, row.saves_bytes) for row in costs] == [((), 0), ((), 0), (("v1",), 64), (("v2",), 64), ((), 0)]
    assert "in place   2 ops can write over an input" in repr(costs)
    assert "in place" not in repr(checkmate.profile(PLAIN))


def test_an_explanation_says_what_they_are_worth() -> None:
    assert PLAIN.keep_all_peak - PROBLEM.keep_all_peak == 64
    assert "2 ops can write over an input that is not needed any more; keeping all, they take 64 B off it" in repr(
        _explained(PROBLEM)
    )
    assert "in place" not in repr(_explained(PLAIN))


def test_pictures_say_it() -> None:
    matplotlib: Any = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    solution, plot = _by_hand(PROBLEM, (4, 1)), checkmate.plot
    assert plot.schedule(solution).get_title().endswith(", 2 runs write over an input")
    assert plot.graph(PROBLEM).get_title().endswith("; 2 can write over an input")
    peak = next(text.get_text() for text in plot.memory(solution).texts if "peak" in text.get_text())
    assert peak == "peak 172 B\nop3 over v2"
    plain = _by_hand(PLAIN, (4, 1))
    assert all("over" not in ax.get_title() for ax in (plot.schedule(plain), plot.graph(PLAIN)))
    matplotlib.pyplot.close("all")
