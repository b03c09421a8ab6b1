"""Plans with transfers, by hand and at random: what they take here, there and in time, and each way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from checkmate.core.host import Host
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, cost, lower, simulate, without_idle_values
from checkmate.core.timing import timing
from checkmate.errors import InvalidProblem
from checkmate.solvers.common.fetches import sendable
from checkmate.solvers.solve import solve
from tests.support.by_hand import schedule_of
from tests.support.oracle import random_problem, random_problem_with_overwrites, random_problem_with_ways
from tests.support.sampling import in_turn
from tests.support.transfers import with_transfers

# five ops, a second each; op 4 reads what op 0 made
CHAIN = Problem.from_dag([[], [0], [1], [2], [0, 3]], seconds=[1] * 5, sizes=[4, 1, 1, 1, 1], forward=3)
HOST = Host(4, send=4.0, fetch=2.0)
AWAY = Plan(
    (
        *(Run(0), Send(0), Run(1), Wait(0), Free(0), Run(2), Free(1)),
        *(Fetch(0), Run(3), Free(2), Wait(0), Drop(0), Run(4), Free(0), Free(3)),
    ),
    boundary=7,
)


def changed(position: int, *steps: Step) -> Plan:
    """AWAY with other steps in place of one."""
    boundary = AWAY.boundary + (len(steps) - 1 if position < AWAY.boundary else 0)
    return Plan((*AWAY.steps[:position], *steps, *AWAY.steps[position + 1 :]), boundary)


def test_a_value_waits_elsewhere_while_ops_run() -> None:
    problem = CHAIN.with_host(HOST)
    assert check_plan(AWAY, problem, budget=6) == []
    usage = simulate(AWAY, problem)
    assert usage.bytes_at == (4, 5, 5, 6, 6)
    assert usage.host_peak == 4
    seen = timing(AWAY, problem)
    assert [(t.begin, t.end) for t in seen.transfers] == [(1.0, 2.0), (3.0, 5.0)]
    assert cost(AWAY, problem) == seen.seconds == 6.0
    assert seen.waited == 1.0
    assert cost(AWAY, CHAIN.with_host(Host(4, send=4.0, fetch=2.0, latency=0.5))) == 7.0  # which keeps the link busy


def test_a_plan_that_only_fetches_uses_the_second_memory() -> None:
    fetches = Plan((Fetch(0), Wait(0), Run(0), Run(1)), boundary=2)
    assert (fetches.sent, fetches.moved, fetches.moves, fetches.is_a_schedule) == (set(), {0}, True, False)
    assert cost(fetches, CHAIN.with_host(HOST)) == 4.0  # it waits two seconds for the link
    with pytest.raises(ValueError, match="uses a second memory, and the problem has none"):
        cost(fetches, CHAIN)
    assert not Plan((Run(0), Run(1)), boundary=2).moves


@pytest.mark.parametrize(("one_link", "seconds"), [(False, 6.0), (True, 8.0)])
def test_directions_share_a_link_or_do_not(one_link: bool, seconds: float) -> None:
    problem = Problem.from_dag(
        [[], [0], [1], [2], [0, 3], [2, 4]], seconds=[1] * 6, sizes=[4, 1, 4, 1, 1, 1], forward=3
    ).with_host(Host(9, send=2.0, fetch=4.0, one_link=one_link))
    steps = (
        *(Run(0), Send(0), Run(1), Run(2), Wait(0), Free(0), Free(1), Send(2)),
        *(Fetch(0), Run(3), Wait(0), Drop(0), Run(4), Wait(2), Drop(2), Run(5), Free(0), Free(2), Free(3), Free(4)),
    )
    plan = Plan(steps, boundary=8)
    assert check_plan(plan, problem) == []
    assert cost(plan, problem) == seconds
    assert simulate(plan, problem).host_peak == 8


def test_the_matrices_of_a_plan_say_where_values_are() -> None:
    schedule = Schedule.of_plan(CHAIN.graph, AWAY)
    assert np.array_equal(schedule.R, np.eye(5, dtype=bool))
    assert schedule.S[:, 0].tolist() == [False, True, False, False, True]
    schedule = schedule_of(CHAIN, (4, 0))  # without transfers they are those of the plan's schedule
    again = Schedule.of_plan(CHAIN.graph, lower(CHAIN, schedule))
    assert np.array_equal(again.R, schedule.R)
    assert np.array_equal(again.S, schedule.S)


def test_every_fault_is_named() -> None:
    for plan, fault in (
        (changed(3), "while its transfer is under way"),  # no wait before it is let go of
        (changed(10), "without its input"),  # and none before it is read
        (changed(1), "on no link"),  # never sent
        (changed(0, Fetch(0), Run(0)), "of which no copy is there"),  # before anything ran
        (changed(4, Free(0), Send(0)), "not at hand"),
        (changed(4), "is at hand"),  # fetched though it never went
        (changed(11), "when the step ends"),  # a copy is left
        (changed(1, Send(0), Send(0)), "while its transfer is under way"),
        (changed(4, Free(0), Drop(0)), "of which no copy is there"),
        (changed(5, Run(2), Wait(2)), "on no link"),
        (changed(4, Send(0), Wait(0), Free(0)), "of which a copy is there"),
        (changed(2, Run(1), Run(0)), "makes it, while"),
        (changed(10, Wait(0), Fetch(0)), "is at hand"),
    ):
        wrong = check_plan(plan, CHAIN.with_host(HOST))
        assert any(fault in one for one in wrong), (fault, wrong)


def test_budgets_of_both_memories_hold() -> None:
    (wrong,) = check_plan(AWAY, CHAIN.with_host(Host(3, send=4.0, fetch=2.0)), budget=6)
    assert "copies in the second memory take 4 B" in wrong
    (wrong,) = check_plan(AWAY, CHAIN.with_host(HOST), budget=5)
    assert "exceeds the budget" in wrong
    assert any("there is no second memory" in wrong for wrong in check_plan(AWAY, CHAIN))
    with pytest.raises(ValueError, match="with_host"):
        timing(AWAY, CHAIN)


@in_turn(numbers=[(-1, 1.0, 1.0), (1.5, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, float("inf")), (1, "fast", 1.0)])
def test_a_host_that_makes_no_sense_is_refused(numbers: tuple[object, ...]) -> None:
    budget, send, fetch = numbers
    with pytest.raises(InvalidProblem):
        Host(budget, send=send, fetch=fetch)


@in_turn(target=["autograd", "_c10d_functional.all_reduce.default"])
def test_what_others_hold_is_not_sent(target: str) -> None:
    graph = CHAIN.graph
    held = replace(CHAIN, graph=replace(graph, ops=(replace(graph.ops[0], target=target), *graph.ops[1:])))
    assert 0 in sendable(CHAIN)
    assert 0 not in sendable(held)
    assert any("which others hold" in wrong for wrong in check_plan(AWAY, held.with_host(HOST)))


@pytest.mark.parametrize("draw", [random_problem, random_problem_with_ways, random_problem_with_overwrites])
def test_plans_with_random_transfers_are_valid(draw: Callable[[int], Problem]) -> None:
    kinds = dict.fromkeys((Send, Fetch, Drop), 0)
    for seed in range(30):
        problem = draw(seed).with_host(Host(10**9, send=3.0, fetch=2.0))
        solution = solve(problem, 10**9, method="next-use")
        plan = with_transfers(problem, solution.plan, np.random.default_rng(seed), share=0.8)
        assert check_plan(plan, problem) == []
        assert simulate(plan, problem).peak <= simulate(solution.plan, problem).peak
        assert cost(plan, problem) >= cost(solution.plan, problem)
        for kind in kinds:
            kinds[kind] += sum(isinstance(step, kind) for step in plan.steps)
    assert kinds[Fetch] > kinds[Send] == kinds[Drop] > 20, kinds


@pytest.mark.parametrize("draw", [random_problem, random_problem_with_overwrites])
def test_values_that_plans_forgot_to_let_go_are_let_go(draw: Callable[[int], Problem]) -> None:
    forgotten = 0
    for seed in range(30):
        problem = draw(seed).with_host(Host(10**9, send=3.0, fetch=2.0))
        tight = (problem.keep_all_peak + int(problem.unavoidable_bytes.max())) // 2
        solution = solve(problem, tight, method="next-use")
        if solution.plan is None:
            continue
        plan = with_transfers(problem, solution.plan, np.random.default_rng(seed), share=0.5)
        for i, step in enumerate(plan.steps):
            idle = Plan(plan.steps[:i] + plan.steps[i + 1 :], plan.boundary - (i < plan.boundary))
            if isinstance(step, Free) and not check_plan(idle, problem):
                trimmed = without_idle_values(idle, problem)
                assert check_plan(trimmed, problem) == []
                assert simulate(trimmed, problem).peak <= simulate(plan, problem).peak
                assert cost(trimmed, problem) <= cost(idle, problem)
                assert without_idle_values(trimmed, problem) is trimmed
                forgotten += trimmed != idle
    assert forgotten > 5
