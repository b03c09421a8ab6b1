"""Beams beside a known plan: never worse, far better close to the smallest budget, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.schedule import Schedule
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import bytes_in_stages, peak_of
from checkmate.solvers.search.backward_beam import detours
from checkmate.solvers.search.min_budget import least_memory
from tests.solvers.checks import all_runs
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn


@pytest.mark.slow
def test_much_less_than_the_plan_of_the_smallest_peak() -> None:
    """Where no pass of eviction fits, the plan of the smallest peak makes everything again in each stage."""
    chain = dags.unit_chain(16)
    start = least_memory(chain)[1]
    found = detours(Task(chain, 4, Clock(60.0)), start)
    assert peak_of(chain, found) <= 4
    assert found.sum() == 67 < start.sum()  # the optimum


def test_the_same_seed_gives_the_same_plan_and_without_time_the_plan_stays() -> None:
    problem = dags.unit_chain(8)
    start = least_memory(problem)[1]
    one, two, same = (detours(Task(problem, 4, Clock(limit), seed=3), start) for limit in (60.0, 60.0, 0.0))
    assert np.array_equal(one, two)
    assert np.array_equal(same, start)


@in_turn(seed=range(5))
def test_bytes_in_stages_are_the_peak_of_each_stage(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    R = all_runs(problem)
    R[:, [op.pinned is not None for op in problem.graph.ops]] = False
    np.fill_diagonal(R, True)
    usage = simulator.simulate(simulator.lower(problem, Schedule.from_runs(problem.graph, R)), problem)
    ends = np.cumsum(R.sum(axis=1))[:-1]  # of the runs of each stage
    assert bytes_in_stages(problem, R)[0].tolist() == [max(part) for part in np.split(np.array(usage.bytes_at), ends)]
