"""Schedules as matrices R and S: what breaks which equation, and that all who count bytes count the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.networks.dags import unit_chain
from checkmate.core import simulator
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.schedule import Schedule
from checkmate.solvers.common.schedules import cost_of
from tests.support.by_hand import random_runs, random_schedule, runs_of, schedule_of
from tests.support.oracle import pinned, random_problem, random_problem_with_ways
from tests.support.paper_equations import bytes_in_memory, peak, violations
from tests.support.sampling import in_turn

# op0 -> op1 -> op2 -> op3, op0 -> op3, and op4 reads op1 and op3; all sizes differ
PROBLEM = Problem.from_dag([[], [0], [1], [0, 2], [1, 3]], [1, 2, 4, 8, 16], [1, 10, 100, 1000, 10_000])
ONCE = schedule_of(PROBLEM)


def _changed(array: np.ndarray, t: int, k: int) -> np.ndarray:
    changed = array.copy()
    changed[t, k] ^= True
    return changed


@in_turn(seed=range(20))
def test_keeps_what_is_read_before_it_is_made_again(seed: int) -> None:
    problem = random_problem(seed, most_ops=10)
    graph, R = problem.graph, random_runs(problem, seed)
    S = Schedule.from_runs(graph, R).S
    for v, value in enumerate(graph.values):
        for t in range(len(R)):
            read = [s for s in range(t, len(R)) if R[s, list(graph.users[v])].any()]
            made = [] if value.producer is None else [s for s in range(t, len(R)) if R[s, value.producer]]
            needed = bool(read) and (not made or read[0] < made[0])
            result = v in graph.outputs and value.producer is not None and value.producer < t
            assert S[t, v] == (value.producer is not None and (result if v in graph.outputs else needed))


def test_running_once_keeps_what_is_read_later() -> None:
    assert ONCE.S.astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 0, 1, 0],
    ]
    assert violations(ONCE, PROBLEM) == []
    assert cost_of(PROBLEM, ONCE.R) == 31
    assert ONCE.recomputed.tolist() == [0] * 5
    assert bytes_in_memory(ONCE, PROBLEM).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 11, 0, 0, 0],
        [11, 11, 111, 0, 0],
        [111, 111, 111, 1111, 0],
        [1010, 1010, 1010, 1010, 11010],
    ]
    assert peak(ONCE, PROBLEM) == 11010
    assert violations(ONCE, PROBLEM, budget=11_010) == []
    assert violations(ONCE, PROBLEM, budget=11_000) == ["(9) U[4, 4] = 11010 exceeds the budget of 11000 by 10"]
    # workspace counts while its op runs, what is resident always
    problem = Problem(PROBLEM.graph, Profile(PROBLEM.seconds, np.array([0, 0, 7, 0, 0]), resident_bytes=100_000))
    assert bytes_in_memory(ONCE, problem)[2:4, 2].tolist() == [100_111 + 7, 100_111]
    chain = unit_chain(8)  # of the golden optima
    assert (cost_of(chain, schedule_of(chain).R), peak(schedule_of(chain), chain)) == (17, 10)


def test_what_runs_again_is_not_kept() -> None:
    again = schedule_of(PROBLEM, (4, 0), (4, 1))
    assert again.S[:, 1].tolist() == [False, False, True, False, False]
    assert violations(again, PROBLEM) == []
    assert cost_of(PROBLEM, again.R) == 34
    assert again.recomputed.tolist() == [1, 1, 0, 0, 0]
    assert bytes_in_memory(again, PROBLEM)[3, 3] == 1101  # without op1's value
    assert bytes_in_memory(again, PROBLEM)[4].tolist() == [1001, 1011, 1010, 1010, 11010]
    assert violations(again, pinned(PROBLEM, 0)) == ["pinned: op0 runs 2 times though it draws random numbers"]


def test_a_result_is_kept_to_the_end() -> None:
    problem = Problem.from_dag([[], [0], [1]], [1] * 3, [1] * 3, outputs=[0, 2])
    again, once = schedule_of(problem, (2, 0), (2, 1)), schedule_of(problem)
    assert again.S[:, 0].tolist() == [False, True, True]
    assert violations(again, problem) == []
    assert bytes_in_memory(again, problem)[2].tolist() == [2, 2, 3]  # op 0 made a second copy for a moment
    dropped = Schedule(once.R, _changed(once.S, 2, 0))
    assert violations(dropped, problem) == ["output: v0 is a result of the step but is not kept to its end"]


def test_each_equation_is_named() -> None:
    for R, S, says in (
        (_changed(ONCE.R, 2, 2), ONCE.S, "(8a) R[2, 2] = 0: op2 does not run in its own stage"),
        (_changed(ONCE.R, 1, 4), ONCE.S, "(8c) R[1, 4] = 1 though 4 > 1"),
        (ONCE.R, _changed(ONCE.S, 0, 3), "(8b) S[0, 3] = 1 but v3 is not made before stage 0"),
        (ONCE.R, _changed(ONCE.S, 3, 3), "(8b) S[3, 3] = 1 but v3 is not made before stage 3"),
        (ONCE.R, _changed(ONCE.S, 3, 0), "(1b) R[3, 3] = 1 but v0 is neither kept nor made in stage 3"),
        (ONCE.R, _changed(ONCE.S, 2, 0), "(1c) S[3, 0] = 1 but v0 is not at hand in stage 2"),
        (ONCE.R[:4], ONCE.S, "R and S have shapes (4, 5) and (5, 5), not (5, 5) and (5, 5)"),
        (ONCE.R, ONCE.S[:, :2], "R and S have shapes (5, 5) and (5, 2), not (5, 5) and (5, 5)"),
    ):
        assert says in violations(Schedule(R, S), PROBLEM, budget=10**9)


def test_values_without_a_producer_are_never_kept() -> None:
    ops = Op("a", "f", (0,), (1,)), Op("b", "f", (0, 1), (2,))
    graph = Graph(ops, (Value("tokens", 1000, None, "input"), Value("x", 4, 0), Value("y", 8, 1)), (2,))
    problem = Problem(graph, Profile(np.ones(2), np.zeros(2)))
    once = schedule_of(problem)
    assert once.S.any(axis=0).tolist() == [False, True, False]
    assert violations(once, problem) == []
    assert bytes_in_memory(once, problem).tolist() == [[4, 0], [4, 12]]


@pytest.mark.parametrize("draw", [random_problem, random_problem_with_ways])
@given(seed=st.integers(0, 10**6))
def test_any_runs_can_be_completed_and_all_count_the_same_bytes(draw: Callable[..., Problem], seed: int) -> None:
    """Schedule and simulator; where each op runs once, the problem too. No first run takes less than is unavoidable."""
    problem = draw(seed, most_ops=9)
    for R in (runs_of(problem), random_runs(problem, seed)):
        schedule = Schedule.from_runs(problem.graph, R)
        plan = simulator.lower(problem, schedule)
        assert violations(schedule, problem) == simulator.check_plan(plan, problem) == []
        assert len(plan.runs) == R.sum()
        usage, seconds = simulator.simulate(plan, problem), simulator.cost(plan, problem)
        assert usage.bytes_at == tuple(bytes_in_memory(schedule, problem)[R])
        assert seconds == pytest.approx(cost_of(problem, schedule.R))
        first = np.array([usage.bytes_at[usage.ops.index(k)] for k in range(len(R))])
        assert (first >= problem.unavoidable_bytes).all()
        if len(plan.runs) == len(R):
            assert usage.bytes_at == tuple(problem.live_bytes)
            assert (usage.peak, seconds) == (problem.keep_all_peak, pytest.approx(problem.keep_all_cost))


@given(st.integers(0, 10**6))
def test_no_kept_value_can_be_spared(seed: int) -> None:
    problem = random_problem(seed, most_ops=6)
    schedule = random_schedule(problem, seed)
    for t, v in np.argwhere(schedule.S):
        assert violations(Schedule(schedule.R, _changed(schedule.S, t, v)), problem) != []


@in_turn(seed=range(10))
def test_more_kept_than_needed_still_lowers_to_a_plan(seed: int) -> None:
    problem = random_problem(seed, most_ops=7)
    least = random_schedule(problem, seed)
    most = np.zeros_like(least.S)
    made_by = [-1 if v.producer is None else v.producer for v in problem.graph.values]
    for t in range(1, len(most)):
        for v, p in enumerate(made_by):
            most[t, v] = p >= 0 and (least.R[t - 1, p] or most[t - 1, v])
    kept = Schedule(least.R, most)
    assert violations(kept, problem) == []
    plan = simulator.lower(problem, kept)
    assert simulator.check_plan(plan, problem) == []
    assert simulator.simulate(plan, problem).peak <= peak(kept, problem)
