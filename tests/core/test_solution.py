"""What a Solution says about itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import checkmate
from checkmate.core import answer, simulator
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.inspection.timeline import timeline
from tests.support.all_plans import random_chain_with_links

PROBLEM = Problem.from_dag([[], [0], [1], [0, 2]], [1, 2, 3, 4], [1000, 2000, 3000, 4000])
R = np.eye(4, dtype=bool)
R[3, 0] = True
SCHEDULE = Schedule.from_runs(PROBLEM.graph, R)
FOUND = Solution(
    Status.FEASIBLE,
    PROBLEM,
    budget=9000,
    method="milp",
    schedule=SCHEDULE,
    plan=simulator.lower(PROBLEM, SCHEDULE),
    cost=11.0,
    bound=10.45,
    peak=8000,
    seconds=0.25,
)
NONE = Solution(Status.INFEASIBLE, PROBLEM, budget=10, method="milp", message="op3 alone needs 8.00 kB")


def _html(text: str) -> tuple[list[str], list[str]]:
    """The elements of HTML, which must be closed, and its texts."""
    tags, texts, left = list[str](), list[str](), list[str]()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)
            left.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert left.pop() == tag

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

        def handle_data(self, data: str) -> None:
            texts.append(data)

    Reader().feed(text)
    assert left == []
    return tags, texts


def test_a_notebook_shows_the_facts_and_the_memory() -> None:
    tags, texts = _html(FOUND._repr_html_())
    title, *facts = str(FOUND).splitlines()
    assert texts[0] == title
    rows = itertools.islice(zip(texts[1::2], texts[2::2], strict=False), len(facts))
    assert [f"  {name:<11}{text}" for name, text in rows] == facts
    assert "Memory over the step: budget 9.00 kB, peak 8.00 kB" in texts
    assert tags.count("svg") == 1
    assert not {"script", "img", "link", "style", "foreignobject"} & set(tags)
    assert "://" not in FOUND._repr_html_()
    far = replace(FOUND, budget=10**9)
    assert "Memory over the step: budget 1.00 GB, above this picture, peak 8.00 kB" in _html(far._repr_html_())[1]
    assert "svg" not in _html(NONE._repr_html_())[0]


def test_what_a_notebook_shows_is_escaped() -> None:
    hostile = "</td><script>alert(1)</script>\"'"
    for solution in (replace(FOUND, message=hostile, method=hostile), replace(NONE, message=hostile)):
        tags, texts = _html(solution._repr_html_())
        assert "script" not in tags
        assert any(hostile in text for text in texts)


def _drawn_bytes(picture: str, top: int) -> list[tuple[float, float]]:
    """(share of the step until which, bytes) of each stretch that the picture draws."""
    path = picture.partition('<path d="')[2].partition('"')[0]
    steps = re.findall(r"V([\d.]+)H([\d.]+)", path)
    return [(float(end) / answer.WIDE, (1 - (float(y) - answer.ROOM) / answer.TALL) * top) for y, end in steps]


def test_the_picture_in_a_notebook_is_that_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        problem = random_chain_with_links(seed)
        solution = checkmate.solve(problem, 10**6)
        assert solution.plan is not None
        assert solution.peak
        line = timeline(solution.plan, problem)
        monkeypatch.setattr(answer, "COLUMNS", 10**6)
        drawn = _drawn_bytes(solution._repr_html_(), solution.peak)
        assert [end for end, _ in drawn] == pytest.approx([end / line.seconds for end in line.begins[1:]], abs=1e-3)
        assert [held for _, held in drawn] == pytest.approx(line.bytes.tolist(), abs=2e-3 * solution.peak)
        monkeypatch.setattr(answer, "COLUMNS", 3)  # fewer than moments: each as high as its highest
        coarse = _drawn_bytes(solution._repr_html_(), solution.peak)
        assert [end for end, _ in coarse] == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-3)
        assert max(held for _, held in coarse) == pytest.approx(solution.peak, abs=2e-3 * solution.peak)


def test_gap_and_overhead() -> None:
    assert FOUND.gap == pytest.approx(0.05)
    assert FOUND.overhead == pytest.approx(0.1)


def test_a_summary_of_a_plan() -> None:
    assert str(FOUND).splitlines() == [
        "feasible (milp): fits the budget; the gap says how much better another schedule could be at most",
        "  budget     9.00 kB",
        "  peak       8.00 kB (100.0% of keeping all)",
        "  step       11.0 s (+10.00% recomputation)",
        "  bound      10.4 s (gap 5.00%)",
        "  runs again 1 of 4 ops, 1 times in all",
        "  solved in  250.0 ms",
    ]


def test_a_summary_without_a_plan() -> None:
    assert str(NONE).splitlines() == [
        "infeasible (milp): op3 alone needs 8.00 kB",
        "  budget     10 B",
        "  solved in  0.0 µs",
    ]
    assert NONE.gap == float("inf")


def test_every_status_says_what_it_means() -> None:
    assert all(status.label and status.meaning for status in Status)
    assert len({status.meaning for status in Status}) == len(Status)
    assert repr(Status.NOT_FOUND) == "Status.NOT_FOUND"


def test_modules_need_a_plan_and_pytorch() -> None:
    with pytest.raises(ValueError, match="no modules without a plan"):
        _ = NONE.modules
    with pytest.raises(ValueError, match="not captured from PyTorch"):
        _ = FOUND.modules


def test_modules_are_written_once() -> None:
    written: list[Plan] = []

    def emit(plan: Plan) -> int:
        written.append(plan)
        return len(written)

    captured = Problem(PROBLEM.graph, PROBLEM.profile, emit)
    solution = Solution(Status.OPTIMAL, captured, 9000, "milp", SCHEDULE, FOUND.plan, 11.0, 11.0, 8000)
    assert (solution.modules, solution.modules) == (1, 1)
    assert written == [FOUND.plan]


def test_a_step_that_costs_nothing() -> None:
    nothing = Problem.from_dag([[]], [0.0], [0])
    once = Schedule.from_runs(nothing.graph, np.eye(1, dtype=bool))
    plan = simulator.lower(nothing, once)
    solution = Solution(Status.OPTIMAL, nothing, 1, "milp", once, plan, 0.0, 0.0, 0)
    assert (solution.gap, solution.overhead) == (0.0, 0.0)
    assert "peak       0 B (0.0% of keeping all)" in str(solution)


TAKES = [
    checkmate.explain_peak,
    checkmate.addresses,
    partial(checkmate.report, path="plan.html"),
    partial(checkmate.diff, FOUND),
    partial(checkmate.diff, b=FOUND),
]


@pytest.mark.parametrize("call", TAKES)
@pytest.mark.parametrize(("given", "kind"), [(PROBLEM, "Problem"), ("plan.html", "str"), (None, "NoneType")])
def test_what_is_no_solution_is_refused(call: Callable[..., Any], given: Any, kind: str) -> None:
    with pytest.raises(TypeError) as refused:
        call(given)
    assert str(refused.value) == f"This takes a Solution, not {kind}. Make one: checkmate.solve(problem, budget)."


def test_a_report_whose_arguments_are_swapped_says_so() -> None:
    with pytest.raises(TypeError, match=r"^The Solution comes first: checkmate.report\(solution, path\)\.$"):
        checkmate.report("plan.html", FOUND)
