"""Local search on what runs again: its count of bytes is the simulator's, and it never makes a plan worse."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem, Schedule
from checkmate.core import simulator
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import as_matrix, as_stages, cost_of
from checkmate.solvers.search.backward_search import AnyOrder
from checkmate.solvers.search.greedy import DeadEnd, Weights, run_pass
from checkmate.solvers.search.local_search import Line, exchange, places_of
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.checks import runs, wrong
from tests.support.all_plans import random_dag, smallest_peak
from tests.support.oracle import PLAIN_AND_WAYS, Make, random_problem
from tests.support.sampling import in_turn, long


@in_turn(make=PLAIN_AND_WAYS, seed=[*range(20), *map(long, range(20, 60))])
def test_bytes_are_the_simulators_whatever_runs(make: Make, seed: int) -> None:
    problem = make(2000 + seed, most_ops=12)
    line, rng = Line(problem, problem.keep_all_peak, runs(problem)), np.random.default_rng(seed)
    for _ in range(10):
        off = np.flatnonzero(~line.fixed)
        for p in rng.choice(off, min(3, len(off)), replace=False).tolist():
            line.flip(p)
        R = as_matrix(line.runs_in_stages())
        assert line.cost == pytest.approx(R.sum(axis=0) @ problem.seconds)
        plan = simulator.lower(problem, Schedule.from_runs(problem.graph, R))
        assert tuple(line.bytes_at[line.on] + problem.resident) == simulator.simulate(plan, problem).bytes_at
        assert line.bytes_at.max() == line.bytes_at[line.on].max()  # where nothing runs is never the peak


def test_offers_at_a_place_are_those_of_a_line_that_was_never_asked() -> None:
    problem, rng = dags.unet(2), np.random.default_rng(0)
    line = Line(problem, problem.keep_all_peak, runs(problem))
    for p in (len(line.on) // 3, len(line.on) // 2):
        places = list(line.offers(p))[:4]
        for _ in range(20):
            line.flip(int(rng.choice(places)))  # runs there or no longer does: its value comes and goes around p
            fresh = Line(problem, problem.keep_all_peak, runs(problem))
            fresh.become(line.on)
            offers = list(line.offers(p))
            assert offers == list(fresh.offers(p))
        assert not set(places) <= set(offers)


@pytest.mark.parametrize("problem", [dags.vgg(10), dags.unet(3), dags.gpt(2)], ids=["vgg", "unet", "gpt"])
def test_never_worse_and_within_the_budget(problem: Problem) -> None:
    budget = (int(problem.unavoidable_bytes.max()) + problem.keep_all_peak) // 2
    stages = run_pass(Tables.of(problem), budget, Weights(0.5, 0.5, 2.0))
    assert not isinstance(stages, DeadEnd)
    found = as_matrix(exchange(Task(problem, budget, Clock(5.0)), stages))
    assert cost_of(problem, found) <= cost_of(problem, as_matrix(stages))
    assert not wrong(problem, found, budget)


# op 0 is dear, and each other one may run again; in the second case op 2 writes over what op 1 made
BESIDE = Problem.from_dag([[], [], [], [0, 1, 2]], [9, 1, 1, 1], [2, 2, 2, 0], workspace=[0, 0, 2, 0])
OVER = Problem.from_dag([[], [], [1], [0, 1, 2]], [9, 1, 1, 1], [4, 4, 4, 0], workspace=[0, 0, 4, 0], over={2: [1]})
NEEDLESS = [*((t, 2) for t in range(9, 13)), *((t, 1) for t in range(8, 13))]


EXCHANGES = {
    "drops what need not run again": (dags.unit_chain(6), 8, NEEDLESS, [1] * 13),
    "runs a cheap op again to save a dear one": (BESIDE, 6, [(3, 0)], [1, 2, 1, 1]),
    "whose value was written over": (OVER, 12, [(3, 0)], [1, 2, 1, 1]),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_exchanges(case: str) -> None:
    problem, budget, again, found = EXCHANGES[case]
    better = as_matrix(exchange(Task(problem, budget, Clock(5.0)), as_stages(runs(problem, *again))))
    assert better.sum(axis=0).tolist() == found


def test_places_are_of_use_and_in_order_and_pinned_ops_have_one() -> None:
    problem = Problem.from_dag([[], [0], [1], [2], [1, 3]], seconds=[1] * 5, sizes=[1] * 5)
    places = places_of(problem, runs(problem)).tolist()
    assert places == sorted(places)
    assert [k for t, k in places if t == 4] == [0, 1, 2, 3, 4]
    for problem in map(random_problem, range(60)):
        for t, k in places_of(problem, runs(problem)).tolist():
            assert t == k or problem.graph.ops[k].pinned is None


@in_turn(seed=[71, 238])
def test_what_runs_out_of_order_fits_and_is_no_dearer(seed: int) -> None:
    """Ops of such a plan run more often than they have to."""
    problem = random_dag(seed)
    budget = smallest_peak(problem)
    stages = AnyOrder(ValueSets(problem), budget, Clock()).runs()
    assert any(ops != sorted(set(ops)) for ops in stages)
    line = Line(problem, budget, as_matrix(stages), stages)
    plan = simulator.lower_runs(problem, stages)
    bytes_at = tuple((line.bytes_at[line.on] + line.tables.resident).tolist())
    assert bytes_at == simulator.simulate(plan, problem).bytes_at
    better = simulator.lower_runs(problem, exchange(Task(problem, budget), stages))
    assert wrong(problem, better, budget) == []
    assert simulator.cost(better, problem) <= simulator.cost(plan, problem)
