"""Keep only what the op before made."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Status
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.runs import on_demand
from checkmate.units import exact_bytes
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

last_node = METHODS["last-node"].solve


@pytest.mark.parametrize("layers", [1, 2, 8, 30])
def test_on_a_unit_chain_each_value_is_made_again_from_the_start(layers: int) -> None:
    """Op L + 1 reads the values of ops L and L - 1, then those of L - 2, …, 0 are read: i + 1 runs to make value i."""
    problem = dags.unit_chain(layers)
    solution = last_node(problem, 3)
    assert solution.plan is not None
    assert simulator.verify(solution.plan, problem, 3) == []
    assert solution.cost == 2 * layers + 1 + layers * (layers + 1) // 2
    assert last_node(problem, 10**6).cost == solution.cost  # whatever the budget


@in_turn(seed=range(40))
def test_nothing_else_is_kept(seed: int) -> None:
    problem = random_problem(seed, most_ops=12)
    graph = problem.graph
    solution = last_node(problem, 10**6)
    assert solution.schedule is not None
    stays = {v for op in graph.ops if op.pinned is not None for v in op.outputs} | set(graph.outputs)
    for t in range(1, len(graph.ops)):
        assert set(np.flatnonzero(solution.schedule.S[t])) <= stays | set(graph.ops[t - 1].outputs)


def test_gradients_run_again_too() -> None:
    problem = dags.resnet((1, 1))
    solution = last_node(problem, problem.keep_all_peak)
    assert solution.schedule is not None
    assert solution.schedule.recomputed[problem.graph.forward_length :].any()


def test_where_it_does_not_fit_it_says_what_it_takes() -> None:
    problem = dags.unet(2)
    R = on_demand(problem, {t: op.outputs for t, op in enumerate(problem.graph.ops)})
    peak = Schedule.from_runs(problem.graph, R).peak(problem)
    assert last_node(problem, peak).peak == peak
    refused = last_node(problem, peak - 1)
    assert (refused.status, refused.details["peak"], refused.plan) == (Status.NOT_FOUND, peak, None)
    assert exact_bytes(peak) in refused.message
