"""What a Solution says about itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import checkmate
from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status

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
