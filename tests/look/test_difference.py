"""Two plans side by side: by hand, and what must hold for any two."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import checkmate
from benchmarks.networks import dags
from checkmate import Problem
from tests.look.test_timeline import _chain
from tests.solvers.checks import by
from tests.support.by_hand import solution_of
from tests.support.sampling import in_turn, long

next_use = by("next-use")


def test_by_hand() -> None:
    """Plan b makes va again in the backward, so that it need not wait there. More of it is in the golden answers."""
    difference = checkmate.diff(solution_of(_chain(), budget=150), solution_of(_chain(), (3, 0), budget=200))
    assert [row.name for row in (*difference.ops, *difference.values)] == ["a", "va"]
    assert [(row.module, row.runs, row.seconds, row.bytes) for row in difference.modules] == [("net.0", 1, 1.0, -10)]
    assert difference


@in_turn(problem=[dags.unit_chain(8), long(dags.unet(2, wide=8)), long(dags.gpt(1))])
def test_any_two_plans(problem: Problem) -> None:
    found: list[Any] = [next_use(problem, int(share * problem.keep_all_peak)) for share in (1.0, 0.85, 0.7)]
    for a, b in combinations(found, 2):
        there, back = checkmate.diff(a, b), checkmate.diff(b, a)
        assert there
        assert sum(row.seconds for row in there.ops) == pytest.approx(b.cost - a.cost)
        assert sorted((row.op, row.seconds) for row in there.ops) == sorted((r.op, -r.seconds) for r in back.ops)
        values = sorted((row.value, row.bytes) for row in there.values)
        assert values == sorted((row.value, -row.bytes) for row in back.values)
        assert sum(row.runs for row in there.modules) == b.schedule.R.sum() - a.schedule.R.sum()
        assert sum(row.bytes for row in there.modules) == sum(row.bytes for row in there.values)


def test_a_network_by_module() -> None:
    problem = Problem.from_json("benchmarks/problems/resnet18.json.gz")
    budgets = [int(share * problem.keep_all_peak) for share in (1.0, 0.7)]
    a, b = (checkmate.solve(problem, budget, method="next-use", time_limit=2) for budget in budgets)
    difference = checkmate.diff(a, b, top=4)
    assert 2 <= len([row for row in difference.modules if row.module != "outside modules"]) <= 4
    assert sum(row.seconds for row in difference.modules) == pytest.approx(b.cost - a.cost)
    sizes = [row.bytes for row in difference.values]
    assert sizes == sorted(sizes, key=lambda size: -abs(size))
    shown = repr(difference)
    assert f"... and {len(difference.ops) - 4} more" in shown
    assert f"... and {len(difference.values) - 4} more" in shown
    assert "\n\nby module\n" in shown
    assert difference._repr_html_().count("<table>") == 7


def test_a_plan_does_not_differ_from_itself() -> None:
    solution = solution_of(_chain())
    difference = checkmate.diff(solution, solution)
    assert not difference
    assert (difference.ops, difference.values, difference.modules) == ((), (), ())
    assert "runs more  no op" in repr(difference)
    assert "\n\n" not in repr(difference)


def test_without_a_backward_a_value_is_kept_at_the_op_of_the_peak() -> None:
    problem = Problem.from_dag([[], [0], [1], [2, 0], [3]], [1] * 5, [1, 1, 5, 1, 1])
    difference = checkmate.diff(solution_of(problem), solution_of(problem, (3, 0)))
    assert difference.kept_at == "at the beginning of op2"
    assert [(row.name, row.bytes) for row in difference.values] == [("v0", -1)]


def test_what_cannot_be_compared_is_refused() -> None:
    slower = replace(_chain(), profile=replace(_chain().profile, seconds=_chain().seconds * 2))
    for other, says in (
        (checkmate.solve(_chain(), 1), "no plan to compare: No schedule fits 1 B"),
        (solution_of(dags.unit_chain(2)), "different problems"),
        (solution_of(slower), "different problems"),
    ):
        with pytest.raises(ValueError, match=says):
            checkmate.diff(solution_of(_chain()), other)
