"""Local search on what runs again: its count of bytes is the simulator's, and it never makes a plan worse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.schedules import as_matrix, cost_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.search.any_order import AnyOrder
from checkmate.solvers.search.greedy import DeadEnd, Weights, run_pass
from checkmate.solvers.search.local_search import Line, exchange, exchange_runs, places_of
from checkmate.solvers.search.value_sets import ValueSets
from tests.support.all_plans import random_dag, smallest_peak
from tests.support.oracle import random_problem, random_problem_with_ways
from tests.support.sampling import in_turn, long

Make = Callable[..., Problem]


def bytes_at_runs(problem: Problem, R: np.ndarray) -> tuple[int, ...]:
    """What the simulator sees at each run."""
    return simulator.simulate(simulator.lower(problem, Schedule.from_runs(problem.graph, R)), problem).bytes_at


@in_turn(make=[random_problem, random_problem_with_ways], seed=[*range(20), *map(long, range(20, 60))])
def test_bytes_are_the_simulators_whatever_runs(make: Make, seed: int) -> None:
    problem = make(2000 + seed, most_ops=12)
    T = len(problem.graph.ops)
    line = Line(problem, problem.keep_all_peak, np.eye(T, dtype=bool))
    rng = np.random.default_rng(seed)
    for _ in range(10):
        off = np.flatnonzero(~line.fixed)
        for p in rng.choice(off, min(3, len(off)), replace=False).tolist():
            line.flip(p)
        R = as_matrix(line.runs_in_stages())
        assert line.cost == pytest.approx(R.sum(axis=0) @ problem.seconds)
        assert tuple(line.bytes_at[line.on] + problem.resident) == bytes_at_runs(problem, R)
        assert line.bytes_at.max() == line.bytes_at[line.on].max()  # where nothing runs is never the peak


def test_offers_at_a_place_are_those_of_a_line_that_was_never_asked() -> None:
    problem, rng = dags.unet(2), np.random.default_rng(0)
    line = Line(problem, problem.keep_all_peak, np.eye(len(problem.graph.ops), dtype=bool))
    for p in (len(line.on) // 3, len(line.on) // 2):
        places = list(line.offers(p))[:4]
        for _ in range(20):
            line.flip(int(rng.choice(places)))  # runs there or no longer does: its value comes and goes around p
            fresh = Line(problem, problem.keep_all_peak, np.eye(line.T, dtype=bool))
            fresh.become(line.on)
            offers = list(line.offers(p))
            assert offers == list(fresh.offers(p))
        assert not set(places) <= set(offers)


@pytest.mark.parametrize("problem", [dags.vgg(10), dags.unet(3), dags.gpt(2)], ids=["vgg", "unet", "gpt"])
def test_never_worse_and_within_the_budget(problem: Problem) -> None:
    budget = (int(problem.unavoidable_bytes.max()) + problem.keep_all_peak) // 2
    stages = run_pass(Tables.of(problem), budget, Weights(0.5, 0.5, 2.0))
    assert not isinstance(stages, DeadEnd)
    found = exchange(Task(problem, budget, Clock(5.0)), as_matrix(stages))
    assert cost_of(problem, found) <= cost_of(problem, as_matrix(stages))
    assert not Schedule.from_runs(problem.graph, found).violations(problem, budget)


# op 0 is dear, and each other one may run again; in the second case op 2 writes over what op 1 made
BESIDE = Problem.from_dag([[], [], [], [0, 1, 2]], [9, 1, 1, 1], [2, 2, 2, 0], workspace=[0, 0, 2, 0])
OVER = Problem.from_dag([[], [], [1], [0, 1, 2]], [9, 1, 1, 1], [4, 4, 4, 0], workspace=[0, 0, 4, 0], over={2: [1]})
NEEDLESS = [*((t, 2) for t in range(9, 13)), *((t, 1) for t in range(8, 13))]


@pytest.mark.parametrize(
    ("problem", "budget", "again", "runs"),
    [
        (dags.unit_chain(6), 8, NEEDLESS, [1] * 13),
        (BESIDE, 6, [(3, 0)], [1, 2, 1, 1]),
        (OVER, 12, [(3, 0)], [1, 2, 1, 1]),
    ],
    ids=["drops what need not run again", "runs a cheap op again to save a dear one", "whose value was written over"],
)
def test_exchanges(problem: Problem, budget: int, again: list[tuple[int, int]], runs: list[int]) -> None:
    start = np.eye(len(runs), dtype=bool)
    start[tuple(zip(*again, strict=True))] = True
    assert exchange(Task(problem, budget, Clock(5.0)), start).sum(axis=0).tolist() == runs


def test_places_are_of_use_and_in_order_and_pinned_ops_have_one() -> None:
    problem = Problem.from_dag([[], [0], [1], [2], [1, 3]], seconds=[1] * 5, sizes=[1] * 5)
    places = places_of(problem, np.eye(5, dtype=bool)).tolist()
    assert places == sorted(places)
    assert [k for t, k in places if t == 4] == [0, 1, 2, 3, 4]
    for seed in range(60):
        problem = random_problem(seed)
        for t, k in places_of(problem, np.eye(len(problem.graph.ops), dtype=bool)).tolist():
            assert t == k or problem.graph.ops[k].pinned is None


@in_turn(seed=[71, 238])
def test_what_runs_out_of_order_fits_and_is_no_dearer(seed: int) -> None:
    """Also what runs more often than it has to."""
    problem = random_dag(seed)
    budget = smallest_peak(problem)
    runs = AnyOrder(ValueSets(problem), budget, Clock()).runs()
    assert any(ops != sorted(set(ops)) for ops in runs)
    line = Line(problem, budget, as_matrix(runs), runs)
    plan = simulator.lower_runs(problem, runs)
    bytes_at = tuple((line.bytes_at[line.on] + line.tables.resident).tolist())
    assert bytes_at == simulator.simulate(plan, problem).bytes_at
    better = simulator.lower_runs(problem, exchange_runs(Task(problem, budget), runs))
    assert simulator.check_plan(better, problem, budget) == []
    assert simulator.cost(better, problem) <= simulator.cost(plan, problem)
