"""What is said of runs that write over an input, in a terminal, as JSON and in pictures; plain problems say nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import checkmate
from checkmate import Problem
from checkmate.cli.json_output import solution_record, steps_of
from checkmate.look.costs import Explanation, pinned_ops
from tests.support.by_hand import solution_of

PROBLEM = Problem.from_dag(
    [[], [0], [1], [2], [1, 3]], [1.0] * 5, [8, 64, 64, 64, 8], workspace=[0, 0, 0, 100, 0],
    over={2: [1], 3: [2]}, forward=3,
)  # fmt: skip
PLAIN = replace(PROBLEM, profile=replace(PROBLEM.profile, ways=()))


def _said(problem: Problem) -> str:
    """All that is printed of a problem and a plan by which op 1 runs again, so that its first value may go."""
    explained = Explanation(pinned_ops(problem), (), "", problem, checkmate.min_budget(problem))
    kept, again = solution_of(problem), solution_of(problem, (4, 1))
    return "\n".join(map(str, (problem, again, checkmate.diff(kept, again), checkmate.costs(problem), explained)))


def test_each_answer_says_so_in_words() -> None:
    assert PLAIN.keep_all_peak - PROBLEM.keep_all_peak == 64
    for words in (
        "5 values, 2 ops in place, keep_all",
        "\n  in place   2 of 6 runs write over an input\n",
        "1 to 2 runs write over an input",
        "in place   2 ops can write over an input",
        "2 ops can write over an input that is not needed any more; keeping all, they take 64 B off it",
    ):
        assert words in _said(PROBLEM)
    assert not re.search("in place|write over", _said(PLAIN))


def test_json_names_what_is_written_over() -> None:
    solution = solution_of(PROBLEM, (4, 1))
    steps = [step for step in steps_of(solution) if "over" in step]
    assert steps == [{"run": "op2", "over": "v1"}, {"run": "op3", "over": "v2"}]
    assert (solution_record(solution)["runs_over"], solution_record(solution_of(PLAIN))["runs_over"]) == (2, 0)


def test_pictures_say_it() -> None:
    matplotlib: Any = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    solution, plot = solution_of(PROBLEM, (4, 1)), checkmate.plot
    assert plot.schedule(solution).get_title().endswith(", 2 runs write over an input")
    peak = next(text.get_text() for text in plot.memory(solution).texts if "peak" in text.get_text())
    assert peak == "peak 172 B\nop3 over v2"
    plain = solution_of(PLAIN, (4, 1))
    assert "over" not in plot.schedule(plain).get_title()
    matplotlib.pyplot.close("all")
