"""Plans: lowering, the simulator, and a checker that finds each kind of fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from checkmate.core.graph import Graph, Op, Value
from checkmate.core.plan import Free, Plan, Run, Step
from checkmate.core.problem import Problem, Profile
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, cost, lower, simulate, without_idle_values
from tests.support.by_hand import plan_of, random_runs, random_schedule
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

GIVEN = Value("tokens", 500, None, "input")
SIZES = {"x": (1, 0), "y": (10, 1), "mask": (100, 1), "loss": (1000, 2), "dx": (10_000, 3), "dw": (100_000, 4)}
GRAPH = Graph(
    ops=(
        Op("a", "f", (0,), (1,)),
        Op("b", "f", (1,), (2, 3), pinned="draws random numbers"),
        Op("loss", "f", (2,), (4,)),
        Op("b_grad", "f", (1, 3), (5,), "backward"),
        Op("a_grad", "f", (0, 5), (6,), "backward"),
    ),
    values=(GIVEN, *(Value(name, size, op) for name, (size, op) in SIZES.items())),
    outputs=(4, 6),
)
PROBLEM = Problem(
    GRAPH, Profile(np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([0, 0, 0, 7, 0]), resident_bytes=2_000_000)
)
KEEP_ALL = plan_of(PROBLEM)
AGAIN = Plan((Run(0), Run(1), Free(1), Run(2), Free(2), Run(0), Run(3), Free(1), Free(3), Run(4), Free(5)), boundary=5)


def test_lower() -> None:
    steps = (Run(0), Run(1), Run(2), Free(2), Run(3), Free(1), Free(3), Run(4), Free(5))
    assert KEEP_ALL == Plan(steps, boundary=4)
    assert KEEP_ALL.runs == (0, 1, 2, 3, 4)
    assert plan_of(PROBLEM, (3, 0)) == AGAIN


def test_simulate_by_hand() -> None:
    usage = simulate(KEEP_ALL, PROBLEM)
    assert usage.ops == (0, 1, 2, 3, 4)
    assert [b - 2_000_000 for b in usage.bytes_at] == [1, 111, 1111, 11_101 + 7, 111_000]
    assert (usage.peak, usage.peak_op) == (2_111_000, 4)
    again = simulate(AGAIN, PROBLEM)
    assert again.ops == (0, 1, 2, 0, 3, 4)
    assert [b - 2_000_000 for b in again.bytes_at] == [1, 111, 1110, 1101, 11_101 + 7, 111_000]
    assert (cost(KEEP_ALL, PROBLEM), cost(AGAIN, PROBLEM)) == (31.0, 32.0)
    twice = simulate(Plan((Run(0), Run(0)), 2), PROBLEM)  # a second copy counts while it is made
    assert [b - 2_000_000 for b in twice.bytes_at] == [1, 2]
    for plan in (KEEP_ALL, AGAIN):
        assert check_plan(plan, PROBLEM, budget=2_111_000) == []
    assert check_plan(KEEP_ALL, PROBLEM, budget=2_110_999) == [
        "the peak of 2.11 MB (2_111_000 bytes) at a_grad exceeds the budget of 2.11 MB (2_110_999 bytes)"
    ]


def _without(i: int, plan: Plan = AGAIN) -> Plan:
    return Plan(plan.steps[:i] + plan.steps[i + 1 :], plan.boundary - (i < plan.boundary))


def _with(i: int, step: Step, plan: Plan = AGAIN) -> Plan:
    return Plan((*plan.steps[:i], step, *plan.steps[i:]), plan.boundary + (i < plan.boundary))


def test_what_is_made_again_before_it_is_read_goes_until_then() -> None:
    idle = _without(2)
    assert simulate(idle, PROBLEM).bytes_at[2] == simulate(AGAIN, PROBLEM).bytes_at[2] + 1
    assert without_idle_values(idle, PROBLEM) == AGAIN
    assert without_idle_values(AGAIN, PROBLEM) is AGAIN


def test_a_plan_is_a_schedule_if_each_stage_runs_its_ops_once_and_in_order() -> None:
    def is_one(*ops: int) -> bool:
        return Plan(tuple(map(Run, ops)), len(ops)).is_a_schedule

    assert [is_one(0, 1, 2), is_one(0, 1, 0, 2), is_one(0, 1, 0, 1, 2), is_one(0, 0, 1)] == [True] * 4
    assert [is_one(0, 1, 1, 0, 2), is_one(0, 1, 0, 0, 2)] == [False] * 2


def test_each_fault_is_found() -> None:
    for plan, says in (
        (Plan((), 0), "a never runs"),
        (_without(3), "loss never runs"),
        (_without(0), "step 0 runs b without its input x"),
        (_without(5), "step 5 runs b_grad without its input x"),
        (_with(5, Free(3)), "step 7 runs b_grad without its input mask"),
        (_with(7, Run(1)), "b runs 2 times though it draws random numbers"),
        (_with(3, Free(1)), "step 3 frees x, which is not at hand"),
        (_with(3, Free(0)), "step 3 frees tokens, which is not at hand"),
        (_with(6, Free(4)), "step 6 frees loss, a result of the step"),
        (_with(6, Free(4)), "loss, a result of the step, is not at hand in the end"),
        (Plan((Run(1), Run(0), *AGAIN.steps[2:]), 5), "step 0 runs b before a"),
        (Plan((Run(0), Run(2), Run(1), Run(3), Run(4)), 3), "step 1 runs loss before b"),
        (Plan((Run(0), Run(1), Run(2), Run(4), Run(3)), 3), "step 3 runs a_grad before b_grad"),
        (replace(AGAIN, boundary=7), "step 6 runs b_grad of the backward in the forward"),
        (replace(AGAIN, boundary=3), "step 3 runs loss of the forward for the first time in the backward"),
    ):
        assert says in check_plan(plan, PROBLEM)


@in_turn(seed=range(30))
def test_any_missing_run_and_any_free_of_what_is_still_read_is_found(seed: int) -> None:
    """Every run of a lowered plan is needed: each is the first of its op, or what is read later is not at hand."""
    problem = random_problem(seed, most_ops=7)
    least = lower(problem, Schedule.from_runs(problem.graph, _least(problem, seed)))
    assert check_plan(least, problem) == []
    for i, step in enumerate(least.steps):
        assert not isinstance(step, Run) or check_plan(_without(i, least), problem) != []
    plan = lower(problem, random_schedule(problem, seed))
    for i, step in enumerate(plan.steps):
        for v in problem.graph.ops[step.op].inputs if isinstance(step, Run) else ():
            assert check_plan(_with(i, Free(v), plan), problem) != []


def _least(problem: Problem, seed: int) -> np.ndarray:
    """Random runs less those that nothing reads: each run is its op's first, or read before its op runs again."""
    R = random_runs(problem, seed)
    for _ in range(R.size):
        S = Schedule.from_runs(problem.graph, R).S
        idle = [(t, k) for t, k in np.argwhere(R) if t > k and not _read(problem, R, S, t, k)]
        if not idle:
            break
        R[idle[0]] = False
    return R


def _read(problem: Problem, R: np.ndarray, S: np.ndarray, t: int, k: int) -> bool:
    """Whether a value that op k makes in stage t is read in that stage, or kept for the next and no result anyway."""
    graph = problem.graph
    return any(
        v not in graph.outputs and (R[t, list(graph.users[v])].any() or (t + 1 < len(R) and S[t + 1, v]))
        for v in graph.ops[k].outputs
    )
