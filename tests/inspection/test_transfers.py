"""Plans that send values to a second memory, as timelines, explanations, differences, addresses and JSON show them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from checkmate.core import simulator
from checkmate.core.host import Host
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Wait
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution
from checkmate.core.timing import timing
from checkmate.inspection.addresses import addresses, lives_of
from checkmate.inspection.difference import diff
from checkmate.inspection.peak import explain_peak
from checkmate.inspection.timeline import timeline
from checkmate.solvers.addresses import Block, live_peak
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.solve import solve
from tests.core.test_timing import AWAY, CHAIN, HOST
from tests.support import oracle
from tests.support.transfers import with_transfers


def certified(problem: Problem, plan: Plan, budget: int = 10**9) -> Solution:
    """The solution that a plan made by hand is."""
    return certify(problem, budget, plan, method="by hand")


def drawn() -> Iterator[Solution]:
    """Random problems with random transfers."""
    for seed in range(15):
        for draw in (oracle.random_problem, oracle.random_problem_with_ways, oracle.random_problem_with_overwrites):
            rng = np.random.default_rng(seed)
            problem = draw(seed).with_host(Host(10**9, send=30.0, fetch=20.0, one_link=bool(seed % 2)))
            plan = solve(problem, 10**9, method="next-use").plan
            assert plan is not None
            yield certified(problem, with_transfers(problem, plan, rng, share=0.8))


SOLUTION = certified(CHAIN.with_host(HOST), AWAY)


def test_a_timeline_by_hand() -> None:
    line = timeline(AWAY, SOLUTION.problem)
    assert [m.begin for m in line.moments] == [0.0, 1.0, 2.0, 3.0, 5.0]
    assert [m.waited for m in line.moments] == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert line.seconds == 6.0
    spans = [(s.name, s.role, s.first, s.ready, s.last, s.uses) for s in line.spans]
    assert spans[0] == ("v0", "activations", 0, 1, 1, (1,))
    assert spans[3] == ("v0", "fetched", 3, 4, 4, (4,))
    assert line.host_bytes == (4, 4, 4, 4, 0)
    assert line.levels == ((0.0, 0), (1.0, 4), (5.0, 0))
    sent, back = line.crossings
    assert (sent.lane, sent.begin, sent.end, sent.waited, sent.after) == ("sent", 1.0, 2.0, 0.0, 0)
    assert (back.lane, back.begin, back.end, back.waited, back.after) == ("fetched", 3.0, 5.0, 1.0, 2)


def test_what_is_fetched_between_two_ops_counts_with_what_is_there_then() -> None:
    problem = Problem.from_dag([[], [], [0]], [1] * 3, [4, 9, 1], workspace=[0, 1, 0], outputs=[]).with_host(HOST)
    steps = (Run(0), Send(0), Wait(0), Free(0), Run(1), Fetch(0), Wait(0), Drop(0), Free(1), Run(2), Free(0), Free(2))
    line = timeline(Plan(steps, 12), problem)
    assert line.bytes.tolist() == list(simulator.simulate(Plan(steps, 12), problem).bytes_at) == [4, 13, 5]
    assert [span.name for span in line.alive(1)] == ["v1", "v0"]
    assert {role: row.tolist() for role, row in line.by_role().items()} == {
        "activations": [4, 9, 1],
        "fetched": [0, 4, 4],
    }
    blocks = [Block(life.born, life.died, life.bytes) for life in lives_of(certified(problem, Plan(steps, 12)))]
    assert live_peak(blocks) == 13


def test_random_plans_add_up_to_the_simulator() -> None:
    between = fetched = 0
    for solution in drawn():
        plan, problem = solution.plan, solution.problem
        assert plan is not None
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
    peak = explain_peak(SOLUTION, prices=False)
    assert peak.moment.name == "op3"  # the copy that comes back is there, and cannot be read yet
    assert [(row.name, row.moving, row.why_not) for row in peak if row.moving] == [
        ("v0", "on its way back", "on its way back")
    ]
    sent_late = Plan((Run(0), Run(1), Send(0), Run(2), Wait(0), *AWAY.steps[4:5], *AWAY.steps[6:]), 7)
    slow = certified(CHAIN.with_host(Host(4, send=4.0, fetch=1e9)), sent_late)
    (row,) = [row for row in explain_peak(slow, prices=False) if row.moving]
    assert (row.name, row.moving, row.drop_seconds) == ("v0", "being sent", None)


@pytest.mark.parametrize(("fetch", "room", "seconds"), [(4.0, 4, 0.0), (1.0, 4, 3.0), (4.0, 3, None)])
def test_the_peak_says_what_sending_a_value_costs(fetch: float, room: int, seconds: float | None) -> None:
    problem = Problem.from_dag([[], [0], [1], [2], [0, 3]], [1] * 5, [4, 1, 2, 1, 1], forward=3)
    problem = problem.with_host(Host(room, send=4.0, fetch=fetch))
    kept = certified(problem, simulator.lower(problem, Schedule.from_runs(problem.graph, np.eye(5, dtype=bool))))
    peak = explain_peak(kept, prices=False)
    assert peak.moment.name == "op2"
    by_name = {row.name: row.send_seconds for row in peak}
    assert by_name == {"v0": seconds, "v2": None, "v1": None}


def test_a_difference_says_what_is_sent() -> None:
    keeps = solve(CHAIN, 10**9)
    difference = diff(keeps, SOLUTION)
    assert [(row.name, row.bytes) for row in difference.sent] == [("v0", 4)]
    assert [(row.name, row.bytes) for row in diff(SOLUTION, keeps).sent] == [("v0", -4)]
    assert difference


def test_equations_without_transfers_do_not_answer_for_plans_with_them() -> None:
    assert SOLUTION.schedule is not None
    for ask in (Schedule.memory, Schedule.peak, Schedule.violations, Schedule.cost):
        with pytest.raises(ValueError, match="simulate, cost and verify"):
            ask(SOLUTION.schedule, SOLUTION.problem)
