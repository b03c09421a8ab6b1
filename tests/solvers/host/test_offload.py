"""Plans that recompute, keep and send away: never worse than recomputation alone, valid, and above their bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Host, Problem, Status, frontier, solve
from checkmate.core.plan import Fetch, Free, Run
from checkmate.core.simulator import check_plan
from checkmate.core.timing import timing
from checkmate.solvers.auto import auto
from checkmate.solvers.common.fetches import MustBeBack, place_transfers, plain_events, with_fetches
from checkmate.solvers.host.offload import SentSets
from checkmate.solvers.linear.moments import moment_bound
from checkmate.solvers.search.min_budget import _known as known_ends
from checkmate.solvers.solve import min_budget
from tests.solvers.checks import begun
from tests.solvers.steps import layers
from tests.support.offers import plan
from tests.support.oracle import ALL_KINDS, pinned
from tests.support.sampling import in_turn

FAST = Host(10**6, send=16.0, fetch=16.0)


def random_host(rng: np.random.Generator) -> Host:
    room, send, fetch = int(rng.integers(0, 40)), float(rng.uniform(0.5, 20)), float(rng.uniform(0.5, 20))
    return Host(room, send, fetch, one_link=bool(rng.random() < 0.5), latency=float(rng.choice([0, 0.2])))


@pytest.mark.long
def test_a_fast_link_makes_recomputation_needless_and_a_slow_one_changes_nothing() -> None:
    problem, budget = layers(12), 8 * 6
    alone, solution = solve(problem, budget), solve(problem.with_host(FAST), budget)
    assert alone.overhead > 0.1
    assert (solution.status, solution.overhead) == (Status.OPTIMAL, pytest.approx(0))
    assert solution.plan.sent
    solution = solve(problem.with_host(Host(10**6, send=1e-3, fetch=1e-3)), budget)
    assert (solution.cost, solution.plan.sent) == (alone.cost, set())


@pytest.mark.parametrize("method", ["auto", "milp"])
def test_transfers_that_take_no_time_beside_the_clock_cost_nothing(method: str) -> None:
    """A fetch that begins as late as it can does not begin after its wait."""
    chain = Problem.from_dag([[], [0], [1], [2], [3, 2], [4, 1], [5, 0]], seconds=[1] * 7, sizes=[2] * 7, forward=4)
    assert solve(chain.with_host(Host(8, send=1e30, fetch=1e30)), 6, method=method).cost == 7


def test_the_host_budget_holds() -> None:
    problem = layers(12).with_host(Host(17, send=16.0, fetch=16.0))
    solution = solve(problem, 8 * 6)
    assert len(solution.plan.sent) <= 12
    assert check_plan(solution.plan, problem, 8 * 6) == []
    roomier = solve(problem.with_host(FAST), 8 * 6)
    assert roomier.cost < solution.cost < solve(layers(12), 8 * 6).cost


def test_what_is_fetched_is_not_made_again() -> None:
    problem = layers(8).with_host(Host(10**6, send=8.0, fetch=8.0))
    fetching = with_fetches(problem, [2])
    solution = solve(fetching.problem, 8 * 5)
    happens, boundary = plain_events(fetching, solution.plan)
    assert [event.value for event in happens if isinstance(event, MustBeBack)] == [2]
    assert [event for event in happens if isinstance(event, Run)].count(Run(2)) == 1
    plan = place_transfers(problem, 8 * 6, happens, boundary)
    assert check_plan(plan, problem, 8 * 6) == []
    fetch, need = plan.steps.index(Fetch(2)), timing(plan, problem)
    assert need.waited == 0.0  # it begins early enough
    assert fetch > plan.steps.index(Run(7))


def test_an_op_waits_to_write_over_a_sent_value_only_without_room_beside_it() -> None:
    """Op 1 may write over v0, whose transfers take seconds."""
    chain = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [8] * 4, over={1: [0]}, forward=3)
    problem = chain.with_host(Host(100, send=2.0, fetch=8.0))
    happens = [Run(0), Run(1, over=0), Run(2), Free(1), MustBeBack(0), Run(3), Free(0), Free(2)]
    placed = place_transfers(problem, 24, happens, 4)
    assert check_plan(placed, problem, 24) == []
    assert Run(1, over=0) not in placed.steps
    assert timing(placed, problem).seconds == 5.0  # when the transfer ends, beside which all ops run
    # Without room for both values op 1 waits for the transfer, and v0 comes back.
    last = Problem.from_dag([[], [0], [1], [2], [0, 3]], [1] * 5, [8, 8, 4, 0, 0], over={1: [0]}, forward=3)
    problem = last.with_host(Host(100, send=4.0, fetch=8.0))
    happens = [Run(0), Run(1, over=0), Run(2), Free(1), Run(3), Free(2), MustBeBack(0), Run(4), Free(0), Free(3)]
    placed = place_transfers(problem, 12, happens, 4)
    assert check_plan(placed, problem, 12) == []
    assert Run(1, over=0) in placed.steps
    assert timing(placed, problem).seconds == 7.0  # two of them until op 1 runs


@in_turn(seed=range(24))
def test_whatever_is_sent_the_plan_is_right_and_no_bound_is_above_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = ALL_KINDS[seed % len(ALL_KINDS)](seed, most_ops=8)
    problem = plain.with_host(random_host(rng))
    budget = int(rng.integers(plain.unavoidable_bytes.max(), plain.keep_all_peak + 1))
    incumbent, other = begun(problem, budget, 20.0), begun(problem, budget, 20.0)
    sets = SentSets(incumbent.task, incumbent, auto)
    stay = {*plain.graph.outputs, *plain.limits.recomputed}
    may = [v for v, size in enumerate(plain.sizes) if size and v not in stay]
    for _ in range(3 if may else 0):
        sets.attempt(rng.choice(may, int(rng.integers(1, len(may) + 1)), replace=False).tolist())  # raises if wrong
    alone = solve(plain, budget, time_limit=5)
    assert moment_bound(other.task, other).value <= min(incumbent.cost, alone.cost) * (1 + 1e-6)


def test_the_smallest_budget_is_that_of_plans_which_send() -> None:
    problem = Problem.from_dag([[], [0], [1], [2], [3, 2], [4, 1], [5, 0]], seconds=[1] * 7, sizes=[8] * 7, forward=4)
    once = pinned(problem, *range(7))
    host = once.with_host(Host(100, send=1.0, fetch=1.0))
    alone, ends = min_budget(once), min_budget(host)
    assert (alone.peak, alone.proven) == (once.keep_all_peak, True)
    assert (ends.peak, ends.bound) == (24, 24)
    assert solve(host, ends.peak).peak == 24
    assert solve(host, 23).status is Status.INFEASIBLE
    few = min_budget(once.with_host(Host(8, send=1.0, fetch=1.0)))
    assert ends.peak < few.peak < alone.peak


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.03])
def test_a_budget_that_is_named_has_a_plan_on_a_slow_machine_too(seconds: float) -> None:
    """Halfway between the smallest budgets with and without a second memory, as if nothing was known of them."""
    problem = dags.gpt(4)
    there = problem.with_host(Host(10**9, send=5e9, fetch=4e9))
    least, alone = (min_budget(one, time_limit=1).peak for one in (there, problem))
    assert least < alone
    for budget in (least, (least + alone) // 2):
        known_ends.clear()
        assert solve(there, budget, time_limit=seconds).plan is not None


def test_a_plan_that_sends_is_remembered_and_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    problem = layers(12).with_host(FAST)
    first, again = (plan(problem, 8 * 6, seconds=5) for _ in range(2))
    assert first.plan.sent
    assert (again.plan, again.cost, again.origin) == (first.plan, first.cost, "plan cache")
    assert solve(problem, 8 * 6, start=first).details["found"] == {"start": first.cost}
    slower = problem.with_host(Host(10**6, send=1.0, fetch=1.0))
    assert plan(slower, 8 * 6, seconds=1).origin != "plan cache"


def test_a_frontier_has_plans_that_send_and_a_method_without_transfers_proves_nothing_about_them() -> None:
    problem, methods = layers(8).with_host(FAST), ["auto", "next-use"]
    rows = frontier(problem, budgets=[8 * 5, 8 * 7], methods=methods, time_limit=3, jobs=1).rows
    best = {(row.method, row.budget): row.cost for row in rows}
    assert best["auto", 8 * 5] < best["next-use", 8 * 5]
    assert all(row.bound <= row.cost for row in rows)
    solution = solve(problem, 8 * 5, method="next-use")
    assert (solution.status, solution.bound) == (Status.FEASIBLE, problem.keep_all_cost)
