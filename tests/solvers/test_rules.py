"""Rules are constraints: every solver against all schedules there are, and refusals that say what each rule costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkmate import Problem, Status, frontier, min_budget, solve
from checkmate.core.rules import with_rules
from checkmate.errors import RuleError, SolverError
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Task, certify
from checkmate.solvers.common.schedules import as_matrix, as_stages, on_demand
from checkmate.solvers.linear.moments import moment_bound
from checkmate.solvers.search.adapt import adapt
from checkmate.solvers.search.backward_search import find_plan
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.greedy import GRID, DeadEnd, Weights, run_pass
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.min_budget import least_memory
from checkmate.solvers.search.value_sets import ValueSets
from checkmate.solvers.solve import FOLLOWS_ALL
from tests.solvers.checks import all_runs, begun, runs, wrong


def network(blocks: int = 3) -> Problem:
    """A chain of ops, each read by the next and by its mirror image in the backward."""
    n = 2 * blocks
    deps: list[list[int]] = [[k - 1] if k else [] for k in range(n + 1)]
    deps += [[n + i, n - 1 - i] for i in range(n)]
    seconds = [1.0 + k % 3 for k in range(2 * n + 1)]
    return Problem.from_dag(deps, seconds, [4] * (n + 1) + [2] * n, forward=n + 1)


def test_the_backward_makes_again_what_a_rule_says() -> None:
    chain = network()
    problem = with_rules(chain, {"op": "recompute"})
    assert problem.limits.recomputed == set(range(7))
    plan = solve(problem, "1 kB", time_limit=5)
    assert (plan.status, plan.cost) == (Status.OPTIMAL, chain.keep_all_cost + chain.seconds[:7].sum())
    assert plan.schedule.recomputed.tolist() == [1] * 7 + [0] * 6
    assert not plan.schedule.S[7, :7].any()
    assert wrong(problem, on_demand(problem, {})) == []
    incumbent = begun(problem, 10**3)
    assert moment_bound(incumbent.task, incumbent, most=1).value == pytest.approx(plan.cost)


def tagged(problem: Problem) -> Problem:
    ops = tuple(replace(op, tags=(op.name,)) for op in problem.graph.ops)
    return replace(problem, graph=replace(problem.graph, ops=ops))


MIRROR = [[], [0], [1], [2], [3, 1], [4, 0], [5, 1], [6, 0]]
DAG = tagged(Problem.from_dag(MIRROR, [2, 5, 4, 4, 5, 3, 1, 1], [3, 6, 4, 4, 2, 6, 2, 5], forward=4))
LIMITED = with_rules(DAG, {"op0": 2})


def test_an_op_runs_no_more_often_than_it_may() -> None:
    """The best plan without the rule runs op 0 three times and takes 34 s, the best with it 37 s."""
    assert solve(DAG, 15, method="milp", gap=0.0).cost == 34
    for method in ("milp", "auto"):
        assert solve(LIMITED, 15, method=method, gap=0.0).cost == 37
    incumbent = begun(LIMITED, 15)
    assert 34 <= moment_bound(incumbent.task, incumbent, most=8).value <= 37 * (1 + 1e-6)
    passes = [run_pass(Tables.of(LIMITED), at, weights) for weights in GRID for at in (15, 17)]
    assert max(sum(0 in ops for ops in stages) for stages in passes if not isinstance(stages, DeadEnd)) <= 2


def test_passes_know_what_the_backward_will_make_again() -> None:
    """Op 0 is dear, and op 2, which is made again in the backward, reads it: so op 1 is let go of."""
    deps = [[], [], [0], [2], [3], [4, 2], [5, 1]]
    problem = with_rules(
        tagged(Problem.from_dag(deps, [10] + [1] * 6, [1, 1, 4, 4, 1, 1, 1], forward=5)), {"op2": "recompute"}
    )
    assert run_pass(Tables.of(problem), 9, Weights()) == [[0], [1], [2], [3], [4], [2, 5], [1, 6]]


@pytest.mark.slow
@pytest.mark.parametrize("asks", [2, "recompute"])
def test_no_stage_fails_on_what_another_may_do(asks: str | int) -> None:
    chain = network(2)
    problem = with_rules(chain, {"op": asks})
    for budget in range(min_budget(problem).peak, 2 * chain.keep_all_peak, 12):
        for method in FOLLOWS_ALL:
            found = solve(problem, budget, method=method, time_limit=1)
            assert found.plan is not None or method != "auto"
            assert "failed" not in found.details


def test_local_search_and_known_plans_obey() -> None:
    _, R = least_memory(LIMITED)
    assert not wrong(LIMITED, as_matrix(exchange(Task(LIMITED, 15, Clock(2.0)), as_stages(R), quiet=20)))
    of_no_bytes = Problem.from_dag(MIRROR, [1] * 8, [0] * 8, forward=4)
    again = with_rules(of_no_bytes, {"op": "recompute"})
    assert not wrong(again, as_matrix(exchange(Task(again, 1, Clock(0.2)), as_stages(on_demand(again, {})))))
    for problem in (with_rules(DAG, {"op1": "recompute"}), again):
        for R in (runs(problem), all_runs(problem)):
            assert not wrong(problem, adapt(Task(problem, 10**6, Clock(2.0)), R))


def not_from_nothing() -> Problem:
    deps = [[], [0], [1], [1, 2], [0, 3], [0, 4], [3, 5], [3, 6], [3, 7]]
    dag = tagged(Problem.from_dag(deps, [1] * 9, [5, 7, 3, 4, 7, 1, 3, 1, 4], forward=5))
    return with_rules(dag, {"op3": "recompute"})


def of_sizes(size: int) -> Problem:
    return with_rules(Problem.from_dag(MIRROR, [1] * 8, [size] * 4 + [2] * 4, forward=4), {"op": "recompute"})


BACKWARDS: dict[str, tuple[Problem, int | None]] = {
    "no bytes, tight": (of_sizes(0), None),
    "no bytes": (of_sizes(0), 10**6),
    "tight": (of_sizes(4), None),
    "roomy": (of_sizes(4), 10**6),
    "not all can be made from nothing": (not_from_nothing(), 16),
}


@pytest.mark.parametrize("case", BACKWARDS)
def test_the_search_backwards_keeps_nothing_that_is_gone(case: str) -> None:
    problem, budget = BACKWARDS[case]
    budget = budget or min_budget(problem).peak
    R, _ = find_plan(ValueSets(problem), budget, width=8, clock=Clock(5.0), exact=True)
    assert not wrong(problem, R, budget)


def test_a_plan_is_made_slim_under_rules_and_what_breaks_them_is_refused() -> None:
    problem = with_rules(network(), {"op": "recompute"})
    assert not wrong(problem, all_runs(problem))
    assert sum(map(len, drop_runs(problem, 10**6, as_stages(all_runs(problem)), Clock(5.0)))) == 13 + 7
    with pytest.raises(SolverError, match="a rule has it made again"):
        certify(problem, 10**6, runs(problem), method="test")
    with pytest.raises(SolverError, match="a rule has it made again"):
        begun(problem, 10**6).offer(runs(problem), "test")


LITERATURE = [name for name in METHODS if name not in FOLLOWS_ALL and not METHODS[name].needs_host]


@pytest.mark.parametrize("method", LITERATURE)
def test_methods_of_the_literature_say_that_they_follow_no_such_rules(method: str) -> None:
    for asks in (2, "recompute"):
        with pytest.raises(RuleError, match=f"Method '{method}' cannot follow the rule 'op': .*auto, milp"):
            solve(network(), "1 kB", method=method, rules={"op": asks})
    assert not solve(network(), "1 kB", method=method, rules={"op": "keep"}).schedule.recomputed.any()


def test_a_start_that_breaks_the_rules_is_made_to_obey() -> None:
    chain = network()
    start = solve(chain, (min_budget(chain).peak + chain.keep_all_peak) // 2, time_limit=5)
    for method in ("auto", "milp"):
        once, gone = (
            solve(chain, chain.keep_all_peak, method=method, start=start, rules={"op": rule}, time_limit=5)
            for rule in ("once", "recompute")
        )
        assert not once.schedule.recomputed.any()
        assert gone.plan is not None
        assert gone.bound >= start.bound  # what was proven without rules holds with them


def test_a_pinned_op_under_a_rule_of_two_runs_once_in_passes_too() -> None:
    deps, sizes = [[], [0], [0, 1], [0, 2], [2, 3]], [2, 2, 8, 8, 1]
    step = Problem.from_dag(deps, seconds=[1] * 5, sizes=sizes, workspace=[0, 0, 0, 4, 0], forward=1, over={3: [2]})
    pin = "draws random numbers"
    ops = [replace(op, pinned=pin if k == 2 else None, tags=(op.name,)) for k, op in enumerate(step.graph.ops)]
    step = replace(step, graph=replace(step.graph, ops=tuple(ops)))
    found = solve(step, 22, method="next-use", rules={"op2": 2, "op1": "once"})
    assert (found.cost, found.status) == (5.0, Status.OPTIMAL)


def test_a_refusal_names_the_rules_in_the_way_with_what_each_costs() -> None:
    deps = [[], [0], [1], [2], [3, 2], [4, 1], [5, 0]]
    chain = Problem.from_dag(deps, seconds=[1] * 7, sizes=[8, 8, 16, 4, 2, 2, 2], forward=4)
    least = min_budget(chain).peak
    refused = solve(chain, least, rules={"op": "keep"}, time_limit=5)
    assert (refused.plan, refused.status) == (None, Status.INFEASIBLE)
    assert (refused.refusal.without, refused.refusal.min_budget) == ({"op": least}, chain.keep_all_peak)
    for budget, rule, says in (
        (least, "keep", f"Rules are in the way: without 'op': 'keep', {least} B would do."),
        (least - 1, 1, f"without 'op': 1, {least} B would do"),
        (least - 1, 9, "No rule is in the way"),
    ):
        assert says in solve(chain, budget, rules={"op": rule}, time_limit=5).message


def test_a_frontier_of_plans_under_rules() -> None:
    """A problem without rules is the problem itself."""
    chain = network()
    rows = frontier(chain, [chain.keep_all_peak], methods=["auto", "milp"], rules={"op": "recompute"}, jobs=1)
    assert [row.cost for row in rows] == [chain.keep_all_cost + chain.seconds[:7].sum()] * 2
    with pytest.raises(RuleError, match="'rotor' cannot follow"):
        frontier(chain, methods=["auto", "rotor"], rules={"op": 2})
    assert with_rules(chain, {}) is solve(chain, 30, rules={}).problem is chain
