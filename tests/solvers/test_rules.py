"""Rules are constraints: every solver against all schedules there are, and refusals that say what each rule costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.rules import with_rules, without_rules
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Status
from checkmate.errors import RuleError, SolverError
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Incumbent, certify
from checkmate.solvers.common.schedules import obeys_limits, on_demand, peak_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.frontier import frontier
from checkmate.solvers.linear.moments import moment_bound
from checkmate.solvers.search.adapt import adapt
from checkmate.solvers.search.backward_search import find_plan
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.greedy import GRID, DeadEnd, Weights, run_pass
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.min_budget import least_runs, min_budget
from checkmate.solvers.search.value_sets import ValueSets
from checkmate.solvers.solve import FOLLOWS_ALL, solve
from tests.support.oracle import all_schedules, interesting_budgets, optimum, outcomes, random_ruled_problem
from tests.support.sampling import few, in_turn, long
from tests.support.searches import found_from

SEEDS = [*range(2), *map(long, range(2, 4)), *few(8, [(seed,) for seed in range(4, 60)])]


def wrong(problem: Problem, R: np.ndarray, budget: int | None = None) -> list[str]:
    return simulator.check_plan(simulator.lower(problem, Schedule.from_runs(problem.graph, R)), problem, budget)


def network(blocks: int = 3) -> Problem:
    """A chain of ops, each read by the next and by its mirror image in the backward."""
    n = 2 * blocks
    deps: list[list[int]] = [[k - 1] if k else [] for k in range(n + 1)]
    deps += [[n + i, n - 1 - i] for i in range(n)]
    seconds = [1.0 + k % 3 for k in range(2 * n + 1)]
    return Problem.from_dag(deps, seconds, [4] * (n + 1) + [2] * n, forward=n + 1)


@in_turn(seed=SEEDS)
def test_every_method_beside_all_schedules_that_obey(seed: int) -> None:
    problem = random_ruled_problem(seed)
    known = outcomes(problem)  # of those that the verifier lets pass
    smallest, ends = min(peak for _, peak in known), min_budget(problem)
    assert ends.bound <= smallest <= ends.peak
    assert problem.limits.max_runs or ends.proven
    assert peak_of(problem, least_runs(problem)[1]) == ends.peak
    assert not wrong(problem, least_runs(problem)[1])
    for budget in interesting_budgets(known):
        best = optimum(known, budget)
        for method in FOLLOWS_ALL if budget > 0 else ():
            found = solve(problem, budget, method=method, time_limit=5, gap=0.0)
            assert found.bound <= best * (1 + 1e-6) or found.status is Status.INFEASIBLE
            assert found.cost >= best * (1 - 1e-9)
            assert (found.status is not Status.INFEASIBLE) or best == float("inf")
            assert found.plan is None or not wrong(problem, found.schedule.R, budget)
            assert "failed" not in found.details
            assert method != "milp" or found.cost == pytest.approx(best)


@in_turn(seed=SEEDS)
def test_every_part_of_auto_obeys(seed: int) -> None:
    problem = random_ruled_problem(seed)
    every = [schedule.R for schedule in all_schedules(problem)]
    good = [R for R in every if not wrong(problem, R)]
    at = {budget: [R for R in good if peak_of(problem, R) <= budget] for budget in {peak_of(problem, R) for R in good}}
    for budget, fitting in sorted(at.items())[:3]:
        task, best = Task(problem, budget, Clock(5.0)), min(float(R.sum(axis=0) @ problem.seconds) for R in fitting)
        dearest = max(fitting, key=lambda R: float(R.sum()))
        for found in found_from(task, dearest, every):
            assert found is None or not wrong(problem, found, budget)
        assert moment_bound(task, Incumbent(task), most=5).value <= best * (1 + 1e-6)


@in_turn(seed=[*range(2), *map(long, range(2, 4))])
def test_what_searches_ask_is_what_the_verifier_finds(seed: int) -> None:
    problem = random_ruled_problem(seed)
    for schedule in all_schedules(problem):
        if not simulator.check_plan(simulator.lower(problem, schedule), without_rules(problem)):
            assert obeys_limits(problem, schedule.R) == (not wrong(problem, schedule.R))


def test_both_formulations_know_rules() -> None:
    problem = with_rules(network(1), {"op": "recompute"})
    at = min_budget(problem).peak
    costs = [solve(problem, at, method="milp", formulation=form).cost for form in ("strengthened", "paper")]
    assert costs[0] == pytest.approx(costs[1])


def test_the_backward_makes_again_what_a_rule_says() -> None:
    chain = network()
    problem = with_rules(chain, {"op": "recompute"})
    assert problem.limits.recomputed == set(range(7))
    plan = solve(problem, "1 kB", time_limit=5)
    assert plan.status is Status.OPTIMAL
    assert plan.schedule is not None
    assert plan.schedule.recomputed.tolist() == [1] * 7 + [0] * 6
    assert not plan.schedule.S[7, :7].any()
    assert plan.cost == chain.keep_all_cost + chain.seconds[:7].sum()
    assert wrong(problem, on_demand(problem, {})) == []
    task = Task(problem, 10**3)
    assert moment_bound(task, Incumbent(task), most=1).value == pytest.approx(plan.cost)


def tagged(problem: Problem) -> Problem:
    """The problem with the name of each op as its tag."""
    ops = tuple(replace(op, tags=(op.name,)) for op in problem.graph.ops)
    return replace(problem, graph=replace(problem.graph, ops=ops))


def test_an_op_runs_no_more_often_than_it_may() -> None:
    """Where the best plan without the rule runs op 0 three times, 34 s, the best with it takes 37 s."""
    deps = [[], [0], [1], [2], [3, 1], [4, 0], [5, 1], [6, 0]]
    dag = tagged(Problem.from_dag(deps, [2, 5, 4, 4, 5, 3, 1, 1], [3, 6, 4, 4, 2, 6, 2, 5], forward=4))
    limited = with_rules(dag, {"op0": 2})
    assert solve(dag, 15, method="milp", gap=0.0).cost == 34
    for method in ("milp", "auto"):
        assert solve(limited, 15, method=method, gap=0.0).cost == 37
    task = Task(limited, 15)
    assert 34 <= moment_bound(task, Incumbent(task), most=8).value <= 37 * (1 + 1e-6)
    assert max(sum(0 in ops for ops in stages) for stages in _passes(limited, 15)) <= 2


def _passes(problem: Problem, budget: int) -> list[list[list[int]]]:
    found = [run_pass(Tables.of(problem), at, weights) for weights in GRID for at in (budget, budget + 2)]
    return [stages for stages in found if not isinstance(stages, DeadEnd)]


def test_passes_know_what_the_backward_will_make_again() -> None:
    """Op 0 is dear, and op 2, which is made again in the backward, reads it: so op 1 is let go of."""
    deps = [[], [], [0], [2], [3], [4, 2], [5, 1]]
    dag = tagged(Problem.from_dag(deps, [10, 1, 1, 1, 1, 1, 1], [1, 1, 4, 4, 1, 1, 1], forward=5))
    problem = with_rules(dag, {"op2": "recompute"})
    assert run_pass(Tables.of(problem), 9, Weights()) == [[0], [1], [2], [3], [4], [2, 5], [1, 6]]


@pytest.mark.slow
@pytest.mark.parametrize("asks", [2, "recompute"])
def test_no_stage_fails_on_what_another_may_do(asks: str | int) -> None:
    chain = network(2)
    problem = with_rules(chain, {"op": asks})
    for budget in range(min_budget(problem).peak, 2 * chain.keep_all_peak, 6):
        for method in FOLLOWS_ALL:
            found = solve(problem, budget, method=method, time_limit=1)
            assert found.plan is not None or method != "auto"
            assert "failed" not in found.details


def test_local_search_and_known_plans_obey() -> None:
    deps = [[], [0], [1], [2], [3, 1], [4, 0], [5, 1], [6, 0]]
    dag = tagged(Problem.from_dag(deps, [2, 5, 4, 4, 5, 3, 1, 1], [3, 6, 4, 4, 2, 6, 2, 5], forward=4))
    limited = with_rules(dag, {"op0": 2})
    _, R = least_runs(limited)
    assert not wrong(limited, exchange(Task(limited, 15, Clock(2.0)), R, quiet=20))
    of_no_bytes = Problem.from_dag(deps, [1] * 8, [0] * 8, forward=4)
    again = with_rules(of_no_bytes, {"op": "recompute"})
    assert not wrong(again, exchange(Task(again, 1, Clock(2.0)), on_demand(again, {})))
    for problem in (with_rules(dag, {"op1": "recompute"}), again):
        for R in (np.eye(8, dtype=bool), np.tril(np.ones((8, 8), dtype=bool))):
            found = adapt(Task(problem, 10**6, Clock(2.0)), R)
            assert found is not None
            assert not wrong(problem, found)


@pytest.mark.parametrize("size", [0, 4])
def test_the_search_backwards_keeps_nothing_that_is_gone(size: int) -> None:
    deps = [[], [0], [1], [2], [3, 1], [4, 0], [5, 1], [6, 0]]
    dag = Problem.from_dag(deps, [1] * 8, [size] * 4 + [2] * 4, forward=4)
    problem = with_rules(dag, {"op": "recompute"})
    for budget in (min_budget(problem).peak, 10**6):
        R, _ = find_plan(ValueSets(problem), budget, width=8, clock=Clock(5.0), exact=True)
        assert R is not None
        assert not wrong(problem, R, budget)


def test_the_search_backwards_where_not_all_can_be_made_from_nothing() -> None:
    deps = [[], [0], [1], [1, 2], [0, 3], [0, 4], [3, 5], [3, 6], [3, 7]]
    dag = tagged(Problem.from_dag(deps, [1] * 9, [5, 7, 3, 4, 7, 1, 3, 1, 4], forward=5))
    problem = with_rules(dag, {"op3": "recompute"})
    R, _ = find_plan(ValueSets(problem), 16, width=8, clock=Clock(5.0), exact=True)
    assert R is not None
    assert not wrong(problem, R, 16)


def test_a_plan_is_made_slim_under_rules() -> None:
    problem = with_rules(network(), {"op": "recompute"})
    everything = np.tril(np.ones((13, 13), dtype=bool))
    assert not wrong(problem, everything)
    assert drop_runs(problem, 10**6, everything, Clock(5.0)).sum() == 13 + 7


def test_the_certifier_refuses_a_schedule_against_the_rules() -> None:
    problem = with_rules(network(), {"op": "recompute"})
    with pytest.raises(SolverError, match="a rule has it made again"):
        certify(problem, 10**6, np.eye(13, dtype=bool), method="test")
    with pytest.raises(SolverError, match="a rule has it made again"):
        Incumbent(Task(problem, 10**6)).offer(np.eye(13, dtype=bool), "test")


@pytest.mark.parametrize(
    "method", [name for name in METHODS if name not in FOLLOWS_ALL and not METHODS[name].needs_host]
)
def test_methods_of_the_literature_say_that_they_follow_no_such_rules(method: str) -> None:
    for asks in (2, "recompute"):
        with pytest.raises(RuleError, match=f"Method '{method}' cannot follow the rule 'op': .*auto, milp"):
            solve(network(), "1 kB", method=method, rules={"op": asks})
    kept = solve(network(), "1 kB", method=method, rules={"op": "keep"})
    assert kept.schedule is not None
    assert not kept.schedule.recomputed.any()


def test_a_start_that_breaks_the_rules_is_made_to_obey() -> None:
    chain = network()
    budget = (min_budget(chain).peak + chain.keep_all_peak) // 2
    start = solve(chain, budget, time_limit=5)
    for method in ("auto", "milp"):
        roomy = solve(chain, chain.keep_all_peak, method=method, start=start, rules={"op": "once"}, time_limit=5)
        assert roomy.schedule is not None
        assert not roomy.schedule.recomputed.any()
        gone = solve(chain, chain.keep_all_peak, method=method, start=start, rules={"op": "recompute"}, time_limit=5)
        assert gone.plan is not None
        assert gone.bound >= start.bound  # what was proven without rules holds with them


def test_a_refusal_names_the_rules_in_the_way_with_what_each_costs() -> None:
    chain = Problem.from_dag(
        [[], [0], [1], [2], [3, 2], [4, 1], [5, 0]], seconds=[1] * 7, sizes=[8, 8, 16, 4, 2, 2, 2], forward=4
    )
    tagged = chain
    least = min_budget(chain).peak
    refused = solve(tagged, least, rules={"op": "keep"}, time_limit=5)
    assert refused.plan is None
    assert refused.status is Status.INFEASIBLE
    assert refused.refusal is not None
    assert refused.refusal.without == {"op": least}
    assert refused.refusal.min_budget == chain.keep_all_peak
    assert f"Rules are in the way: without 'op': 'keep', {least} B would do." in refused.message
    below = solve(tagged, least - 1, rules={"op": 1}, time_limit=5)
    assert f"without 'op': 1, {least} B would do" in below.message
    harmless = solve(tagged, least - 1, rules={"op": 9}, time_limit=5)
    assert "No rule is in the way" in harmless.message


def test_a_frontier_of_plans_under_rules() -> None:
    chain = network()
    rows = frontier(chain, [chain.keep_all_peak], methods=["auto", "milp"], rules={"op": "recompute"}, jobs=1)
    assert [row.cost for row in rows] == [chain.keep_all_cost + chain.seconds[:7].sum()] * 2
    with pytest.raises(RuleError, match="'rotor' cannot follow"):
        frontier(chain, methods=["auto", "rotor"], rules={"op": 2})


def test_no_rules_are_the_problem_itself() -> None:
    chain = network()
    assert with_rules(chain, {}) is chain
    assert solve(chain, 30, rules={}).problem is chain
