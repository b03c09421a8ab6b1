"""The exact model and the bound of all plans, beside the cheapest of all plans there are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from checkmate import Host, Problem, Status, solve
from checkmate.core import simulator
from checkmate.core.rules import with_rules
from checkmate.solvers.host.exact import exact
from tests.solvers.checks import begun, wrong
from tests.support.all_plans import cheapest_plan, random_chain_with_host, random_problem_with_host
from tests.support.oracle import Make, best_within, drawn, random_problem, random_ruled_problem
from tests.support.sampling import long, slow

ONCE = 1 + 1e-6  # solvers round
CHAIN = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[4, 1, 1, 1, 1], sizes=[2] * 5, forward=3)
CARRIES = Host(2, send=4.0, fetch=4.0)


def random_ruled_problem_with_host(seed: int, *, most_ops: int = 5) -> Problem:
    rates = np.random.default_rng((seed, 5)).choice([1.0, 4.0, 8.0], 2).tolist()
    return random_ruled_problem(seed, most_ops=most_ops).with_host(Host(20, *rates))


def budgets(problem: Problem) -> set[int]:
    """The least that could do, and some in between."""
    least = int(problem.unavoidable_bytes.max())
    return {least, least + 1, (least + problem.keep_all_peak) // 2}


def test_all_plans_are_as_good_as_all_schedules_where_nothing_is_sent() -> None:
    for problem, budget, best in best_within(drawn(random_problem, range(12))):
        cheapest, plan = cheapest_plan(problem, budget)
        assert cheapest == pytest.approx(best)
        assert plan is None or wrong(problem, plan, budget) == []


def test_the_cheapest_plan_is_one_that_the_simulator_knows() -> None:
    sent = 0
    for seed in range(8):
        problem = random_chain_with_host(seed, most_ops=5)
        for budget in budgets(problem):
            cheapest, plan = cheapest_plan(problem, budget)
            if plan is not None:
                assert (wrong(problem, plan, budget), simulator.cost(plan, problem)) == ([], pytest.approx(cheapest))
                sent += bool(plan.sent)
            assert cheapest <= cheapest_plan(problem.with_host(None), budget)[0] + 1e-9
    assert sent > 3


def test_the_cheapest_plan_of_a_chain_counted_by_hand() -> None:
    """Value 0 is gone while ops 2 and 3 run, and nothing but op 1 runs while it goes: half a second is waited for."""
    problem = CHAIN.with_host(CARRIES)
    assert [cheapest_plan(problem, budget)[0] for budget in (6, 8, 5)] == [8.5, 8.0, math.inf]
    assert cheapest_plan(problem.with_host(Host(1, send=4.0, fetch=4.0)), 6)[0] == 12.0


@pytest.mark.parametrize("make", [random_problem_with_host, random_chain_with_host, random_ruled_problem_with_host])
@pytest.mark.parametrize(("first", "seeds"), [(0, 5), slow(5, 5), long(10, 50), long(60, 90)])
def test_no_plan_is_below_the_bound_and_few_found_are_above_the_cheapest(make: Make, first: int, seeds: int) -> None:
    above = []
    for seed in range(first, first + seeds):
        problem = make(seed, most_ops=5)
        for budget in budgets(problem):
            cheapest, _ = cheapest_plan(problem, budget)
            incumbent = begun(problem, budget, 60)
            found = exact(incumbent.task, incumbent)
            bound = max(found.details.get("bound", 0.0), incumbent.bound)
            assert bound / ONCE <= cheapest <= incumbent.cost * ONCE, (seed, budget)
            if cheapest < math.inf:
                above.append(incumbent.cost > cheapest * ONCE)
    assert sum(above) <= 0.02 * len(above)


def test_milp_proves_its_plan_with_a_second_memory_the_best() -> None:
    """Recomputation is left without a second memory, and where links carry nothing in time."""
    problem = CHAIN.with_host(CARRIES)
    solution = solve(problem, 6, method="milp")
    assert (solution.status, solution.cost, solution.bound) == (Status.OPTIMAL, 8.5, 8.5)
    assert (solution.plan.sent, solution.details["bound"]) == ({0}, pytest.approx(8.5))
    assert solve(problem, 5, method="milp").status is Status.INFEASIBLE
    for host in (None, Host(100, send=1e-3, fetch=1e-3), Host(0, 4.0, 4.0)):
        assert solve(CHAIN.with_host(host), 6, method="milp").cost == 12.0
    assert solve(CHAIN, 6, method="milp", formulation="paper").method == "milp (paper)"
    for method in ("offload-all", "capuchin", "poet"):
        with pytest.raises(ValueError, match=r"is for a step with a second memory"):
            solve(CHAIN, 8, method=method)
    with pytest.raises(ValueError, match="With a second memory there is formulation='strengthened'"):
        solve(problem, 6, method="milp", formulation="paper")


@pytest.mark.parametrize("method", ["auto", "milp", "poet"])
def test_links_beyond_what_a_solver_takes_carry_nothing(method: str) -> None:
    """A copy would take 1e20 times an op, and values are more than 1e15 times the room for them."""
    quick = replace(CHAIN, profile=replace(CHAIN.profile, seconds=1e-6 * CHAIN.seconds))
    large = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], [4, 1, 1, 1, 1], [15 * 10**14] * 5, forward=3)
    for problem, host, budget, seconds in (
        (quick, Host(100, send=1e-14, fetch=1e-14), 6, 12e-6),
        (quick, Host(100, 4.0, 4.0, latency=1e300), 6, 12e-6),
        (large, Host(1, 4.0, 4.0), 45 * 10**14, 12.0),
    ):
        found = solve(problem.with_host(host), budget, method=method)
        assert (found.cost, found.details.get("failed")) == (pytest.approx(seconds), None)


def test_a_copy_is_no_way_around_a_rule() -> None:
    first, *others = CHAIN.graph.ops
    graph = replace(CHAIN.graph, ops=(replace(first, tags=("first",)), *others))
    problem = replace(CHAIN, graph=graph, host=Host(100, send=100.0, fetch=100.0))
    assert solve(problem, 8, method="milp").cost == 8.0
    problem = with_rules(problem, {"first": "recompute"})
    solution = solve(problem, 8, method="milp")
    assert solution.cost == solution.bound == 12.0
    assert not solution.plan.sent
