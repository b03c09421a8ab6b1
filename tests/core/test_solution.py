"""What a Solution says about itself."""

from __future__ import annotations

import html
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import checkmate
from checkmate import errors
from checkmate.core import answer
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.look import page
from checkmate.look.timeline import timeline
from tests.support.all_plans import random_chain_with_links
from tests.support.by_hand import plan_of, schedule_of, solution_of
from tests.support.sampling import in_turn

PROBLEM = Problem.from_dag([[], [0], [1], [0, 2]], [1, 2, 3, 4], [1000, 2000, 3000, 4000])
SCHEDULE, PLAN = schedule_of(PROBLEM, (3, 0)), plan_of(PROBLEM, (3, 0))
FOUND = Solution(Status.FEASIBLE, PROBLEM, 9000, "milp", SCHEDULE, PLAN, 11.0, 10.45, 8000, 0.25)
NONE = Solution(Status.INFEASIBLE, PROBLEM, budget=10, method="milp", message="op3 alone needs 8.00 kB")


def test_what_a_notebook_shows_is_escaped() -> None:
    hostile = "</td><script>alert(1)</script>\"'"
    for solution in (replace(FOUND, message=hostile, method=hostile), replace(NONE, message=hostile)):
        shown = solution._repr_html_()
        assert html.escape(hostile) in shown
        assert not re.search("<(script|img|link|style|foreignobject)|://", shown)


def _drawn_bytes(picture: str, top: int) -> list[tuple[float, float]]:
    """(share of the step until which, bytes) of each stretch that the picture draws."""
    path = picture.partition('<path d="')[2].partition('"')[0]
    steps = re.findall(r"V([\d.]+)H([\d.]+)", path)
    return [(float(end) / answer.WIDE, (1 - (float(y) - answer.ROOM) / answer.TALL) * top) for y, end in steps]


def test_the_picture_in_a_notebook_is_that_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        problem = random_chain_with_links(seed)
        solution = checkmate.solve(problem, 10**6)
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
    assert NONE.gap == float("inf")
    free = solution_of(Problem.from_dag([[]], [0.0], [0]), budget=1)  # of no seconds and no bytes
    assert (free.gap, free.overhead) == (0.0, 0.0)
    assert "peak       0 B (0.0% of keeping all)" in str(free)


def test_a_gap_that_is_not_closed_is_never_written_as_zero() -> None:
    nearly = replace(FOUND, bound=FOUND.cost * (1 - 1e-5))
    assert "(gap < 0.01%)" in str(nearly)
    assert ("Gap", "< 0.01%") in [tile[:2] for tile in page.tiles(nearly)]
    assert "(gap 0.01%)" in str(replace(FOUND, bound=FOUND.cost * (1 - 1e-4)))
    assert "(gap 0.00%)" in str(replace(FOUND, bound=FOUND.cost))


def test_every_status_says_what_it_means() -> None:
    assert all(status.label and status.meaning for status in Status)
    assert len({status.meaning for status in Status}) == len(Status)
    assert repr(Status.NOT_FOUND) == "Status.NOT_FOUND"


def test_modules_are_written_once() -> None:
    written: list[Plan] = []

    def emit(plan: Plan) -> int:
        written.append(plan)
        return len(written)

    captured = Problem(PROBLEM.graph, PROBLEM.profile, emit)
    solution = replace(FOUND, problem=captured)
    assert (solution.modules, solution.modules) == (1, 1)
    assert written == [PLAN]
    for given, says in ((NONE, "no modules without a plan"), (FOUND, "not captured from PyTorch")):
        with pytest.raises(ValueError, match=says):
            _ = given.modules


REPORTS = partial(checkmate.report, path="plan.html")
DIFFERS = partial(checkmate.diff, FOUND), partial(checkmate.diff, b=FOUND)


@in_turn(call=[checkmate.explain_peak, checkmate.addresses, REPORTS, *DIFFERS], given=[PROBLEM, "plan.html", None])
def test_what_is_no_solution_is_refused(call: Callable[..., Any], given: Any) -> None:
    says = f"This takes a Solution, not {type(given).__name__}. Make one: checkmate.solve(problem, budget)."
    with pytest.raises(TypeError, match=f"^{re.escape(says)}$"):
        call(given)


@in_turn(plans=[[], [FOUND]])
def test_a_compiled_step_is_told_where_its_solutions_are(plans: list[Solution]) -> None:
    step = SimpleNamespace(plans=plans)
    for call in (checkmate.report, checkmate.explain_peak, checkmate.addresses):
        with pytest.raises(
            TypeError, match=r"^This takes a Solution, not SimpleNamespace\. Those of a compiled step"
        ) as error:
            call(step)  # type: ignore[arg-type]
        assert ("call the step once" in str(error.value)) != bool(plans)
        assert str(error.value).endswith("give step.plans[0].")


def test_a_report_takes_the_solution_first() -> None:
    with pytest.raises(TypeError, match=r"^The Solution comes first: checkmate.report\(solution, path\)\.$"):
        checkmate.report("plan.html", FOUND)


@pytest.mark.parametrize("error", [errors.CheckmateError, *errors.CheckmateError.__subclasses__()])
def test_an_error_comes_whole_from_another_process(error: type[Exception]) -> None:
    about = {"budget": 1, "min_budget": 2, "op": "mm"} if error is errors.InfeasibleBudget else {}
    there = error("no plan", **about)
    here = pickle.loads(pickle.dumps(there))
    assert (type(here), str(here), vars(here)) == (error, "no plan", about)
