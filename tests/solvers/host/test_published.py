"""The published methods with a second memory: their plans are valid, do what they say, and are above the cheapest."""

from __future__ import annotations

import math

import pytest

from checkmate import Host, Problem, Status, solve
from checkmate.core.plan import Fetch, Run, Send
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import Task
from checkmate.solvers.host.policies import Policy, candidates, every_swap
from tests.solvers.checks import by, check
from tests.support.all_plans import cheapest_plan, random_chain_with_host, random_problem_with_host

# four layers and their backward, a second each; op 8 reads what op 0 made, 7 and 1, 6 and 2, 5 and 3
DEPS = [[], [0], [1], [2], [3], [4, 3], [5, 2], [6, 1], [7, 0]]
LAYERS = Problem.from_dag(DEPS, seconds=[1] * 9, sizes=[4, 4, 4, 4, 1, 1, 1, 1, 1], forward=5)
FAST = Host(100, send=8.0, fetch=8.0)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.needs_host])
def test_plans_are_valid_and_above_the_cheapest(method: str) -> None:
    found = 0
    problems = [random_chain_with_host(seed, most_ops=5) for seed in range(5)]
    for problem in (*problems, *(random_problem_with_host(seed, most_ops=5) for seed in (0, 3))):
        for budget in (problem.keep_all_peak, problem.keep_all_peak - 1):
            cheapest, _ = cheapest_plan(problem, budget)
            solution = by(method)(problem, budget, time_limit=20)
            assert solution.bound / (1 + 1e-6) <= cheapest <= solution.cost * (1 + 1e-9)
            if solution.plan is not None:
                check(solution)
                found += 1
    assert found


def test_offload_all_sends_all_that_has_time_to_be_away() -> None:
    problem = LAYERS.with_host(FAST)
    plan = solve(problem, 13, method="offload-all").plan
    assert plan.sent == {0, 1, 2}  # value 3 is needed again right after the loss
    assert plan.runs == tuple(range(9))
    fetched = plan.steps.index(Fetch(0))
    assert plan.steps[fetched:].index(Run(7)) < plan.steps[fetched:].index(Run(8))  # one op before its use
    assert [swap.after for swap in every_swap(problem)] == [1, 2, 3]
    solution = solve(problem, 9, method="offload-all")
    assert solution.status is not Status.FEASIBLE
    assert "its only plan takes 10 B here" in solution.message
    there = solve(LAYERS.with_host(Host(4, 8.0, 8.0)), 13, method="offload-all").message
    assert "and 12 B there" in there


def test_capuchin_takes_values_by_free_time() -> None:
    found = sorted(candidates(LAYERS.with_host(FAST)), key=lambda candidate: -candidate.free_time)
    assert [(c.swap.value, c.free_time, c.back) for c in found] == [(0, 5.0, 8), (1, 3.0, 7), (2, 1.0, 6)]
    assert found[0].swap.after == 1
    assert found[0].swap.fetch == 7  # half a second before op 8
    plan = solve(LAYERS.with_host(FAST), 14, method="capuchin").plan
    assert plan.sent == {0}  # that is enough
    assert plan.runs == tuple(range(9))


def test_capuchin_recomputes_what_is_cheaper_to_make_again() -> None:
    for host, budget, sent in (
        (Host(100, send=1.0, fetch=1.0), 13, set()),  # a value takes eight seconds there and back
        (Host(4, send=8.0, fetch=8.0), 9, {0}),  # room for one value there
    ):
        plan = solve(LAYERS.with_host(host), budget, method="capuchin").plan
        assert plan.sent == sent
        assert len(plan.runs) > 9


def test_capuchin_counts_what_was_made_again_already() -> None:
    policy = Policy(Task(LAYERS.with_host(Host(100, send=0.1, fetch=0.1)), 9))
    (second,) = (c for c in policy.left if c.swap.value == 2)
    assert policy._seconds_again(second) == 1.0  # from value 1
    policy.dropped[1] = 2
    assert policy._seconds_again(second) == 2.0  # op 1 before it


def test_poet_pays_for_each_page_and_is_for_small_graphs() -> None:
    solution = solve(LAYERS.with_host(Host(100, send=16.0, fetch=16.0)), 14, method="poet")
    assert solution.details["one device"] == pytest.approx(9.5)  # a quarter of a second there, a quarter back
    assert solution.details["overlapped"] == solution.cost == 9.0
    assert sum(isinstance(step, Send) for step in solution.plan.steps) == 1
    chain = Problem.from_dag([[k - 1] if k else [] for k in range(250)], [1] * 250, [1] * 250)
    solution = solve(chain.with_host(FAST), 2, method="poet")
    assert (solution.status in (Status.NOT_FOUND, Status.INFEASIBLE), solution.cost) == (True, math.inf)
    assert "of use up to 200 ops" in solution.message
