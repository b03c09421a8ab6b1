"""What is in memory while a plan runs: by hand, and against the simulator on random plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate import Problem
from checkmate.core import simulator
from checkmate.core.graph import CodePlace, Graph, Op, Value, code_place_of
from checkmate.core.inplace import InPlace
from checkmate.core.plan import Free, Plan, Run
from checkmate.core.problem import Profile
from checkmate.look.timeline import ROLES, Timeline, timeline
from tests.solvers.checks import by
from tests.support.by_hand import plan_of, random_schedule
from tests.support.oracle import all_schedules, random_problem, random_problem_with_ways
from tests.support.sampling import in_turn, long

next_use = by("next-use")


def _chain() -> Problem:
    """Four ops, the last two of the backward; the first value is read by op 1 and op 3."""
    ops = (
        Op("a", "mm", (0,), (2,), "forward", None, "net.0 (Linear, net.py:1)"),
        Op("b", "relu", (2,), (3,), "forward", None, "net.1 (ReLU, net.py:2)"),
        Op("c", "relu_backward", (3,), (4,), "backward", None, "net.1 (ReLU, net.py:2)"),
        Op("d", "mm_backward", (1, 2, 4), (5,), "backward", None, "net.py:3"),
    )
    given = Value("x", 5, None, "input"), Value("w", 7, None, "parameter")
    made = Value("va", 10, 0), Value("vb", 20, 1), Value("vc", 40, 2), Value("vd", 80, 3)
    return Problem(Graph(ops, (*given, *made), outputs=(5,)), Profile([1.0, 2.0, 4.0, 8.0], [0, 3, 0, 0], 15))


AGAIN = Plan((Run(0), Run(1), Free(2), Run(2), Free(3), Run(0), Run(3), Free(2), Free(4)), boundary=3)


def test_a_plan_by_hand() -> None:
    """Its moments, its spans and its bytes by role are those of the page `runs again` of the golden answers."""
    line = timeline(AGAIN, _chain())
    assert [m.phase for m in line.moments] == ["forward", "forward", "backward", "backward", "backward"]
    assert [m.op_phase for m in line.moments] == ["forward", "forward", "backward", "forward", "backward"]
    assert [m.time for m in line.moments] == [0, 0, 0, 1, 0]
    assert (line.seconds, line.boundary, line.peak, line.peak_moment.name) == (16.0, 2, 145, "d")
    assert [line.spans[1].next_use(moment) for moment in range(3)] == [2, 2, None]
    assert [s.name for s in line.alive(4)] == ["vd", "vc", "va"]  # the most bytes first
    less = replace(_chain(), profile=Profile(_chain().seconds, _chain().workspace, 6))
    assert timeline(AGAIN, less).resident == {"other resident": 6}  # values that share bytes have no role
    assert {module: row.tolist() for module, row in line.by("module").items()} == {
        "resident": [15] * 5,
        "outside modules": [0, 0, 0, 0, 80],
        "net.0": [10, 10, 0, 10, 10],
        "net.1": [0, 23, 60, 40, 40],
    }
    with pytest.raises(ValueError, match="by 'role' or by 'module', not by 'size'"):
        line.by("size")


def test_a_value_that_is_still_there_when_its_op_runs_again_is_there_twice() -> None:
    problem = Problem.from_dag([[], [0]], [1.0, 1.0], [10, 1], outputs=[0, 1])
    line = timeline(Plan((Run(0), Run(0), Run(1)), 3), problem)
    assert [m.bytes for m in line.moments] == [10, 20, 11]
    assert [(s.first, s.last, s.uses) for s in line.spans] == [(0, 2, (2,)), (1, 1, ()), (2, 2, ())]


def test_what_writes_over_a_value_takes_its_storage() -> None:
    """Op 2 writes over op 1's value with 3 bytes more of workspace; op 3 over that of op 2."""
    ways = (InPlace(2, 2, 1, 6), InPlace(2, 2, 1, 4), InPlace(3, 3, 2, 0))
    problem = Problem.from_dag([[], [0], [1], [0, 2]], [1.0] * 4, [10] * 4, workspace=[0, 0, 1, 2])
    problem = replace(problem, profile=replace(problem.profile, ways=ways))
    plan = Plan((Run(0), Run(1), Run(2, over=1), Run(3, over=2), Free(0)), 4)
    line = timeline(plan, problem)
    assert [(m.bytes, m.workspace, m.over) for m in line.moments] == [
        (10, 0, ""), (20, 0, ""), (20 + 4, 4, "v1"), (20, 0, "v2"),
    ]  # fmt: skip
    assert [(s.name, s.first, s.last, s.uses, s.continues) for s in line.spans] == [
        ("v0", 0, 3, (1, 3), None), ("v1", 1, 1, (2,), None), ("v2", 2, 2, (3,), 1), ("v3", 3, 3, (), 2),
    ]  # fmt: skip
    _agrees(line, plan, problem)


def test_what_is_no_plan_has_no_timeline() -> None:
    problem = Problem.from_dag([[], [0], [1], [0, 2]], [1.0] * 4, [10] * 4, over={2: [1]})
    for steps, says in (
        ((), "runs nothing"),
        ((Run(0), Run(1), Free(1), Run(2, over=0), Run(3)), "runs op2 over v0, which no way"),
        ((Run(0), Run(1), Free(1), Run(2, over=1), Run(3)), "runs op2 over v1, which no way"),  # it is gone
    ):
        with pytest.raises(ValueError, match=says):
            timeline(Plan(steps, len(steps)), problem)


PLACES = {
    "layer1.0.conv2 (Conv2d, resnet.py:31)": CodePlace("layer1.0.conv2", "Conv2d", "resnet.py:31"),
    "layer1.0 (Conv2d)": CodePlace("layer1.0", "Conv2d", ""),
    "GPT2LMHeadModel, loss_utils.py:42": CodePlace("", "GPT2LMHeadModel", "loss_utils.py:42"),
    "features.3": CodePlace("features.3"),
    "modeling_gpt2.py:567": CodePlace("", "", "modeling_gpt2.py:567"),
    **dict.fromkeys(("generated code", "", None), CodePlace()),
}


@in_turn(where=PLACES)
def test_the_parts_of_where(where: str | None) -> None:
    assert code_place_of(where) == PLACES[where]


def _agrees(line: Timeline, plan: Plan, problem: Problem) -> None:
    usage = simulator.simulate(plan, problem)
    assert tuple(m.op for m in line.moments) == usage.ops
    assert tuple(line.bytes.tolist()) == usage.bytes_at
    assert line.peak == usage.peak
    assert line.peak_moment.op == usage.peak_op
    for rows in (line.by_role(), line.by_module(), line.by_module(groups=2)):
        assert np.array_equal(sum(rows.values()), line.bytes)
    for index in {0, len(line.moments) // 2, len(line.moments) - 1}:
        moment = line.moments[index]
        held = sum(span.bytes for span in line.alive(index)) + sum(line.resident.values())
        assert held + moment.workspace == moment.bytes
    assert {span.role for span in line.spans} <= set(ROLES)


@in_turn(seed=[*range(8), *map(long, range(8, 20))])
def test_it_says_what_the_simulator_says(seed: int) -> None:
    problem = random_problem(seed)
    for schedule in islice(all_schedules(problem), 0, None, 31):
        plan = simulator.lower(problem, schedule)
        if not simulator.check_plan(plan, problem):
            _agrees(timeline(plan, problem), plan, problem)


@in_turn(seed=range(30))
def test_it_says_so_of_what_is_written_over(seed: int) -> None:
    problem = random_problem_with_ways(seed, most_ops=9)
    for plan in (plan_of(problem), simulator.lower(problem, random_schedule(problem, seed))):
        line = timeline(plan, problem)
        _agrees(line, plan, problem)
        runs = [step for step in plan.steps if isinstance(step, Run)]
        overs = [(i, run.over) for i, run in enumerate(runs) if run.over is not None]
        taken = [(span, line.spans[span.continues]) for span in line.spans if span.continues is not None]
        assert [(new.first, old.value) for new, old in taken] == overs
        assert all(old.last + 1 == new.first == old.uses[-1] and old.bytes == new.bytes for new, old in taken)


@in_turn(problem=[dags.vgg(), long(dags.unet(2)), long(dags.gpt(2))])
def test_it_says_so_of_the_plans_of_training_steps(problem: Problem) -> None:
    solution = next_use(problem, int(0.7 * problem.keep_all_peak))
    line = timeline(solution.plan, problem)
    _agrees(line, solution.plan, problem)
    assert line.seconds == pytest.approx(solution.cost)
    reads = [(span.value, use) for span in line.spans for use in span.uses]
    values, ops = problem.graph.values, problem.graph.ops
    made = [v for moment in line.moments for v in ops[moment.op].inputs if values[v].producer is not None]
    assert len(reads) == len(made)
    assert all(span.first < use <= span.last for span in line.spans for use in span.uses)


def test_modules_of_a_network_are_taken_together() -> None:
    problem = Problem.from_json("benchmarks/problems/vgg16.json.gz")
    rows = timeline(checkmate.solve(problem, 10**12, method="checkpoint-all").plan, problem).by_module(groups=4)
    assert list(rows)[:2] == ["resident", "outside modules"]
    assert 2 <= len(rows) - 2 <= 4
