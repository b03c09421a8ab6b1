"""Plans that are found, beside the best of all plans, which may run ops again in any order, and as often as need be.

A schedule, R and S, runs each op at most once a stage, in PyTorch's order. The smallest budget, and `auto` on graphs as
small as these, speak of all plans; `milp` speaks of schedules, and says so.
"""

from __future__ import annotations

import pytest

from checkmate import Plan, Problem, Status, frontier, min_budget, solve
from checkmate.core import simulator
from checkmate.core.plan import Free, Run
from checkmate.solvers import plan_cache
from checkmate.solvers.common import incumbent
from checkmate.solvers.search.min_budget import MinBudget, least_memory
from tests.solvers.checks import wrong
from tests.solvers.steps import FIVE
from tests.support.all_plans import cheapest_plan, is_a_schedule, random_chain_with_host, random_dag
from tests.support.oracle import Make, outcomes, random_problem, random_problem_with_ways
from tests.support.sampling import in_turn, long

NINE_BYTES = Plan(
    (Run(0), Run(1), Run(2), Free(2), Run(3), Free(0), Run(2), Free(1), Run(0), Run(4), Free(0), Free(2)), 12
)


def test_five_ops_that_fit_only_where_they_run_again_out_of_order() -> None:
    assert wrong(FIVE, NINE_BYTES, 9) == []
    assert (simulator.cost(NINE_BYTES, FIVE), is_a_schedule(NINE_BYTES)) == (7.0, False)
    assert (FIVE.unavoidable_bytes.max(), min(peak for _, peak in outcomes(FIVE))) == (8, 10)
    assert min_budget(FIVE) == MinBudget(8, 8)
    for budget, seconds in ((9, 7.0), (8, 8.0)):
        cheapest, plan = cheapest_plan(FIVE, budget)
        assert (cheapest, is_a_schedule(plan)) == (seconds, False)
        found = solve(FIVE, budget)
        assert (found.status, found.cost, found.bound) == (Status.OPTIMAL, seconds, seconds)
        assert not found.plan.is_a_schedule
        refused = solve(FIVE, budget, method="milp")
        assert refused.status is Status.INFEASIBLE
        assert "each op once a stage at most, in PyTorch's order" in refused.status.meaning
        assert "Method 'auto' has one." in refused.message
    assert solve(FIVE, 7).status is Status.INFEASIBLE


def test_a_plan_of_which_a_schedule_does_not_say_all_is_kept_whole() -> None:
    """It is a start, is on disk, comes from other processes to a frontier, and holds within a larger budget."""
    found = solve(FIVE, 9)
    record = plan_cache.Record.of(found, "auto", 1.0)
    again = plan_cache.from_document(plan_cache.as_document(record), "memory").certified(FIVE, 9)
    assert (again.plan, again.cost) == (found.plan, 7.0)
    assert incumbent.again(found, FIVE, 9).plan == found.plan
    assert [row.cost for row in frontier(FIVE, [8, 9], jobs=2)] == [8.0, 7.0]
    assert solve(FIVE, 9, start=found).cost == 7.0


def beside_all_plans(problem: Problem) -> int:
    """Solve within a few budgets, near the least that could do; how often a plan fits where no schedule does.

    Where a schedule fits, no plan is faster than the best of these in any of these problems.
    """
    least, better = min_budget(problem).peak, 0
    of_schedules, unavoidable = least_memory(problem)[0], int(problem.unavoidable_bytes.max())
    for budget in sorted({unavoidable, unavoidable + 1, least - 1, least, of_schedules}):
        if unavoidable <= budget < problem.keep_all_peak:
            solution = solve(problem, budget, gap=0.0)
            cheapest, plan = cheapest_plan(problem, budget)
            assert (solution.plan is None) == (plan is None) == (budget < least)
            assert solution.cost == pytest.approx(cheapest)
            assert solution.bound == pytest.approx(solution.cost)
            if solution.plan is not None and budget < of_schedules:
                assert not solution.plan.is_a_schedule
                assert solve(problem, budget, method="milp", gap=0.0).status is Status.INFEASIBLE
                better += 1
    return better


def random_chain(seed: int) -> Problem:
    return random_chain_with_host(seed).with_host(None)


# of 300 seeds, those whose problems have such plans
OUT_OF_ORDER: dict[Make, set[int]] = {
    random_dag: {71, 238},
    random_problem: set(),
    random_problem_with_ways: {89},
    random_chain: {21, 50, 59, 146, 193, 289, 297},  # an op of the backward reads two activations
}


@in_turn(make=OUT_OF_ORDER, first=[0, 70, *map(long, range(10, 70, 10)), *map(long, range(80, 300, 10))])
def test_what_is_found_is_the_best_of_all_plans(make: Make, first: int) -> None:
    for seed in range(first, first + 10):
        assert (beside_all_plans(make(seed)) > 0) == (seed in OUT_OF_ORDER[make]), seed


@pytest.mark.parametrize("first", [long(first) for first in range(0, 100, 10)])
def test_of_seven_ops_too(first: int) -> None:
    for seed in range(first, first + 10):
        beside_all_plans(random_dag(seed, ops=7))
