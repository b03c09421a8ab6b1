"""Plans that send values to a second memory, as timelines, explanations, differences, addresses and JSON show them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from checkmate.core import simulator
from checkmate.core.host import Host
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Wait
from checkmate.core.problem import Problem
from checkmate.core.timing import timing
from checkmate.look.addresses import addresses, storages_of
from checkmate.look.difference import diff
from checkmate.look.peak import explain_peak
from checkmate.look.timeline import timeline
from checkmate.solvers.addresses import live_peak
from checkmate.solvers.solve import solve
from tests.core.test_timing import AWAY, CHAIN, HOST
from tests.support.by_hand import plan_of, solution_of
from tests.support.oracle import random_problem, random_problem_with_overwrites, random_problem_with_ways
from tests.support.sampling import in_turn
from tests.support.transfers import with_transfers

SOLUTION = solution_of(CHAIN.with_host(HOST), plan=AWAY, budget=10**9)


def test_a_timeline_by_hand() -> None:
    """More of it is on the page `second memory` of the golden answers."""
    line = timeline(AWAY, SOLUTION.problem)
    assert [(s.name, s.role, s.ready) for s in line.spans][::3] == [("v0", "activations", 1), ("v0", "fetched", 4)]
    sent, back = line.crossings
    assert (sent.lane, sent.waited, sent.after) == ("sent", 0.0, 0)
    assert (back.lane, back.waited, back.after) == ("fetched", 1.0, 2)


def test_what_is_fetched_between_two_ops_counts_with_what_is_there_then() -> None:
    problem = Problem.from_dag([[], [], [0]], [1] * 3, [4, 9, 1], workspace=[0, 1, 0], outputs=[]).with_host(HOST)
    steps = (Run(0), Send(0), Wait(0), Free(0), Run(1), Fetch(0), Wait(0), Drop(0), Free(1), Run(2), Free(0), Free(2))
    line = timeline(Plan(steps, 12), problem)
    assert line.bytes.tolist() == list(simulator.simulate(Plan(steps, 12), problem).bytes_at) == [4, 13, 5]
    assert [span.name for span in line.alive(1)] == ["v1", "v0"]
    roles = {role: row.tolist() for role, row in line.by_role().items()}
    assert roles == {"activations": [4, 9, 1], "fetched": [0, 4, 4]}
    storages = storages_of(solution_of(problem, plan=Plan(steps, 12)))
    assert live_peak([block for block, _ in storages]) == 13


def test_random_plans_add_up_to_the_simulator() -> None:
    between = fetched = 0
    for seed, draw in product(range(15), (random_problem, random_problem_with_ways, random_problem_with_overwrites)):
        problem = draw(seed).with_host(Host(10**9, send=30.0, fetch=20.0, one_link=bool(seed % 2)))
        kept = solve(problem, 10**9, method="next-use").plan
        plan = with_transfers(problem, kept, np.random.default_rng(seed), share=0.8)
        solution = solution_of(problem, plan=plan, budget=10**9)
        line, usage, seen = timeline(plan, problem), simulator.simulate(plan, problem), timing(plan, problem)
        assert line.bytes.tolist() == list(usage.bytes_at)
        for what in ("role", "module"):
            assert np.array_equal(sum(line.by(what).values()), line.bytes)
        assert max(line.host_bytes) == usage.host_peak == max(level for _, level in line.levels)
        assert line.seconds == seen.seconds == solution.cost
        waited = sorted(c.waited for c in line.crossings if c.waited)
        assert waited == pytest.approx(sorted(s for _, s in seen.stalls))
        ends = [m.begin + m.seconds + m.waited for m in line.moments]
        assert ends == pytest.approx([*(m.begin for m in line.moments[1:]), line.seconds])
        for m in line.moments:
            held = sum(span.bytes for span in line.alive(m.index))
            assert held + problem.resident + int(line.workspaces[m.index]) == m.bytes
            between += line.ticks[m.index] != m.tick
        fetched += sum(span.role == "fetched" for span in line.spans)
        placed = addresses(solution, time_limit=0.1)
        assert placed.bound >= line.peak - problem.resident
    assert between > 0
    assert fetched > 50


def test_the_peak_says_what_is_on_a_link() -> None:
    """On its way there; on its way back: the golden answers."""
    sent_late = Plan((Run(0), Run(1), Send(0), Run(2), Wait(0), *AWAY.steps[4:5], *AWAY.steps[6:]), 7)
    slow = solution_of(CHAIN.with_host(Host(4, send=4.0, fetch=1e9)), plan=sent_late)
    (row,) = [row for row in explain_peak(slow, prices=False) if row.moving]
    assert (row.name, row.moving, row.drop_seconds) == ("v0", "being sent", None)


@in_turn(of=[(4.0, 4, 0.0), (1.0, 4, 3.0), (4.0, 3, None)])
def test_the_peak_says_what_sending_a_value_costs(of: tuple[float, int, float | None]) -> None:
    fetch, room, seconds = of
    problem = Problem.from_dag([[], [0], [1], [2], [0, 3]], [1] * 5, [4, 1, 2, 1, 1], forward=3)
    problem = problem.with_host(Host(room, send=4.0, fetch=fetch))
    peak = explain_peak(solution_of(problem, plan=plan_of(problem)), prices=False)
    assert peak.moment.name == "op2"
    assert {row.name: row.send_seconds for row in peak} == {"v0": seconds, "v2": None, "v1": None}


def test_a_difference_says_what_is_sent() -> None:
    keeps = solve(CHAIN, 10**9)
    for difference, sent in ((diff(keeps, SOLUTION), 4), (diff(SOLUTION, keeps), -4)):
        assert difference
        assert [(row.name, row.bytes) for row in difference.sent] == [("v0", sent)]
