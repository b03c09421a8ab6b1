"""Steps with values at home in a second memory: plans beside the cheapest of all there are, bounds never above it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from checkmate import Host, Problem, Status, solve
from checkmate.cli.json_output import solution_record
from checkmate.core.plan import Fetch, Free, Run, Send, Wait
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan
from checkmate.core.timing import timing
from checkmate.errors import InvalidProblem
from checkmate.look.costs import Explanation, pinned_ops
from checkmate.look.difference import diff
from checkmate.look.peak import explain_peak
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.fetches import MustBeBack, place_transfers, plain_events, sendable, with_fetches
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import lowered
from checkmate.solvers.host.kept import keep_homes
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.links import proven_seconds
from checkmate.solvers.linear.moments import build
from checkmate.solvers.solve import min_budget
from tests.solvers.checks import check
from tests.support.all_plans import cheapest_plan, random_problem_with_homes
from tests.support.offers import plan
from tests.support.sampling import in_turn, long

ONCE = 1 + 1e-6  # solvers round
# ops 0 and 1 are layers with a parameter each, ops 2 and 3 their gradients, ops 4 and 5 update by these and a state
STEP = Problem.from_dag(
    [[], [0], [1, 0], [1], [2], [3]],
    seconds=[2, 2, 2, 2, 1, 1],
    sizes=[4, 4, 4, 4, 0, 0],
    outputs=[1],
    forward=2,
    parameters=[(4, [0], 4), (4, [1, 2], 5), (8, [], 4), (8, [], 5)],
)
HOST = Host(100, send=4.0, fetch=4.0)
HOMES = STEP.with_host(HOST).with_homes([6, 7, 8, 9])


def budgets(problem: Problem) -> list[int]:
    """The least that could do, a little more, halfway, and all."""
    least, most = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    return sorted({least, least + 2, (least + most) // 2, most})


@pytest.mark.parametrize(("first", "seeds"), [(1, 3), long(4, 6), long(0, 100), long(100, 100)])
def test_no_plan_is_below_the_bound_and_few_found_are_above_the_cheapest(first: int, seeds: int) -> None:
    above = []
    for seed in range(first, first + seeds):
        problem = random_problem_with_homes(seed)
        for budget in budgets(problem):
            cheapest, _ = cheapest_plan(problem, budget)
            solution = solve(problem, budget, time_limit=1)
            assert solution.bound / ONCE <= cheapest <= solution.cost * ONCE, (seed, budget)
            if solution.plan is not None:
                check(solution)
            if cheapest < math.inf:
                above.append(solution.cost > cheapest * ONCE)
    assert sum(above) <= 0.05 * len(above)


@in_turn(seed=[5, 7, 13, *map(long, (12, *range(14, 40)))])
def test_the_exact_program_proves_the_cheapest_plan(seed: int) -> None:
    """Others, as seed 52, have a bound below that: it leaves out in which order a link carries transfers."""
    problem = random_problem_with_homes(seed)
    for budget in budgets(problem):
        cheapest, _ = cheapest_plan(problem, budget)
        solution = solve(problem, budget, method="milp", time_limit=5)
        assert solution.bound == pytest.approx(cheapest, rel=1e-4)
        assert solution.cost <= cheapest * ONCE
        if solution.plan is not None:
            check(solution)


def linear_bound(problem: Problem, budget: int, moments: list[int], *, choose: bool = False) -> float:
    result = highs.run(build(problem, budget, moments, choose=choose).model, relax=True)
    return proven_seconds(problem, result.bound, choose=choose)


@in_turn(seed=[*range(2, 4), *map(long, [0, 1, *range(4, 40)])])
def test_no_model_of_moments_is_above_the_cheapest_plan_whatever_is_kept(seed: int) -> None:
    problem, rng = random_problem_with_homes(seed), np.random.default_rng(seed)
    T, homes = len(problem.graph.ops), sorted(problem.homes)
    sets = [kept for n in range(len(homes) + 1) for kept in itertools.combinations(homes, n)]
    for budget in budgets(problem)[1:2]:
        cheapest = {kept: cheapest_plan(problem.with_homes(homes, kept), budget)[0] for kept in sets[:8]}
        for moments in ([], [T - 1], sorted(set(rng.integers(0, T, 2).tolist())), [*range(T)]):
            for kept, seconds in cheapest.items():
                assert linear_bound(problem.with_homes(homes, kept), budget, moments) <= seconds * ONCE
            if len(sets) <= 8:
                assert linear_bound(problem, budget, moments, choose=True) <= min(cheapest.values()) * ONCE


def test_a_step_is_planned_beside_its_links() -> None:
    solution = solve(HOMES, 20)
    check(solution)
    assert solution.plan.sent == {6, 7, 8, 9}
    order = [step for step in solution.plan.steps if step.__class__ in (Fetch, Run, Send)]
    assert order.index(Fetch(6)) < order.index(Run(0)) < order.index(Run(4)) < order.index(Send(8))
    # It takes what all transfers take, or the ops with what is waited for before the first and after the last.
    assert solution.bound <= solution.cost
    assert solution.cost >= STEP.keep_all_cost + 1 + 3
    faster = solve(STEP.with_host(HOST).with_homes([6, 7, 8, 9], kept=[6]), 20)
    check(faster)
    assert faster.cost <= solution.cost - 1 + 1e-9
    assert solve(HOMES, 19).status is Status.INFEASIBLE


def test_what_stands_for_homes_among_the_fetch_ops() -> None:
    """Op 2 overwrites what ops 0 and 3 read: op 3 reads another value, with a fetch op behind op 2."""
    step = Problem.from_dag(
        [[], [0], [1], [0]], [1] * 4, [2, 2, 0, 1], [3], parameters=[(4, [0, 3], 2), (3, [0], None)]
    )
    problem = step.with_host(HOST).with_homes([4, 5])
    fetching = with_fetches(problem, [])
    graph = fetching.problem.graph
    names = [op.name for op in graph.ops]
    assert names == ["fetch w0", "fetch w1", "op0", "op1", "op2", "fetch w0", "op3"]
    assert [value.name for value in graph.values] == ["v0", "v1", "v2", "v3", "w0", "w1", "home of w0", "w0"]
    assert (graph.overwritten_by, graph.ops[6].inputs) == ({6: 4}, (0, 7))
    assert {fetching.plain[v] for v in graph.ops[2].inputs} == {4, 5}
    assert graph.ops[0].inputs == graph.ops[2].inputs[2:] == (6,)
    kept = with_fetches(step.with_host(HOST).with_homes([4, 5], kept=[5]), [])
    assert (fetching.away, kept.away, kept.problem.graph.ops[-1].name) == ({0, 1}, {0}, "end")
    # A plan that lets go of w0 in between fetches it, and it alone, as long as it is current there.
    T = len(graph.ops)
    runs = np.eye(T, dtype=bool)
    runs[4, 0] = True
    events, boundary = plain_events(fetching, lowered(fetching.problem, runs))
    back = [event.value for event in events if isinstance(event, MustBeBack)]
    assert back == [4, 5, 4]
    placed = place_transfers(problem, 12, events, boundary)
    assert check_plan(placed, problem, 12) == []
    assert placed.steps.count(Fetch(4)) == 2
    assert 5 not in sendable(problem)


def test_a_send_that_holds_up_another_one_begins_after_it() -> None:
    """Op 0 overwrites w0, op 1 overwrites w1, whose room op 2 needs first."""
    step = Problem.from_dag([[], [], [0]], [1, 1, 3], [1, 0, 6], [2], parameters=[(4, [], 0), (4, [], 1)])
    problem = step.with_host(Host(8, send=1.0, fetch=8.0)).with_homes([3, 4])
    happens = [MustBeBack(3), MustBeBack(4), Run(0), Run(1), Free(1), Free(4), Run(2), Free(0), Free(3)]
    placed = place_transfers(problem, 11, happens, len(happens))
    assert check_plan(placed, problem, 11) == []
    sends = [step.value for step in placed.steps if isinstance(step, Send)]
    assert sends == [4, 3]
    assert placed.steps[-6:] == (Wait(4), Free(4), Run(2), Free(0), Wait(3), Free(3))
    assert timing(placed, problem).seconds == 11.0  # 3 until op 1 has run, 4 for w1, and 4 for w0, beside op 2


def test_what_is_kept_is_what_the_bound_would_keep() -> None:
    """Op 0 waits a second for its parameter, the last op three for what it sends: the first of these can be saved."""
    chosen, bound = keep_homes(Task(HOMES, 24))
    assert (chosen.kept, chosen.homes) == ({6}, HOMES.homes)
    assert STEP.keep_all_cost + 2 <= bound <= solve(chosen, 24, time_limit=2).cost < solve(HOMES, 24, time_limit=2).cost
    assert keep_homes(Task(HOMES, 24, Clock(0.0)))[0].kept == set()
    # No room for a copy in the beginning, and in the end.
    full = HOMES.with_host(Host(24, send=4.0, fetch=4.0))
    assert keep_homes(Task(full, 7))[0].kept == set()


def test_the_smallest_budget_has_a_plan() -> None:
    ends = min_budget(HOMES)
    assert (ends.peak, ends.bound) == (20, 20)  # op 4 with its gradient, its parameter and its state, and the result
    check(solve(HOMES, ends.peak))


def test_a_known_plan_is_a_start() -> None:
    first = solve(HOMES, 20, time_limit=2)
    assert solve(HOMES, 20, start=first, time_limit=0.01).cost <= first.cost
    assert solve(HOMES, 20, start=Schedule.from_runs(HOMES.graph, np.eye(6, dtype=bool)), time_limit=1).plan is not None


def test_a_plan_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    first, again = (plan(HOMES, 24, seconds=1) for _ in range(2))
    assert (again.plan, again.cost, again.origin) == (first.plan, first.cost, "plan cache")
    kept = plan(HOMES.with_homes(HOMES.homes, [6]), 24, seconds=1)
    assert (kept.origin, kept.cost < first.cost) != ("plan cache", False)


def test_what_a_person_asks_of_such_a_plan() -> None:
    kept = HOMES.with_homes(HOMES.homes, [6])
    small, large = (solve(kept, budget, time_limit=1) for budget in (24, 32))
    held = {row.name: row for row in explain_peak(small, prices=False).held}
    assert (held["w0"].why_not, held["w0"].role) == ("at home in the second memory", "fetched")
    assert held["w2"].why_not in ("on its way back", "at home in the second memory")
    assert diff(large, small).b is small
    assert "4 values, 24 B" in str(small)
    # What is at home where, and what the links carry: by hand, from the plan's transfers.
    moved = [int(kept.sizes[step.value]) for step in small.plan.steps if isinstance(step, Fetch)]
    use = small.second_memory
    assert (use.fetched, use.sent) == (sum(moved), 4 + 4 + 8 + 8)
    assert "at home    24 B in the second memory, 4 B kept here between calls" in str(small)
    assert f"links      in {sum(moved)} B, out 24 B, {use.waited / small.cost:.0%} of the step waits" in str(small)
    assert "none kept here between calls" in str(solve(HOMES, 24, time_limit=1))
    assert "at home" not in str(solve(STEP.with_host(HOST), 24, time_limit=1))
    # What more room would buy: each bound is that of the step with as much room.
    more = explain_peak(small, time_limit=1.0)
    now, here, there = (row.bound for row in more.room_bounds)
    assert now == keep_homes(Task(kept, 24))[1] >= here == keep_homes(Task(kept, 32))[1]
    assert there == keep_homes(Task(kept.with_host(Host(116, send=4.0, fetch=4.0)), 24))[1]
    assert f"would be {1 - here / now:.1%} less with 8 B more here, 0.0% less with 16 B more there" in str(more)
    text = str(Explanation(pinned_ops(kept), (), "", kept, min_budget(kept)))
    assert "at home    24 B in the second memory, here only while in use" in text
    record = solution_record(small)["second_memory"]
    assert (record["homes"], record["kept"], record["sent"], record["fetched"]) == (24, 4, 24, sum(moved))


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.homes])
def test_other_methods_say_that_they_know_of_no_homes(method: str) -> None:
    with pytest.raises(InvalidProblem, match=f"Method '{method}' plans no step with values at home"):
        solve(HOMES, 20, method=method)
