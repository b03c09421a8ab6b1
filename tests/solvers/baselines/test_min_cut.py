"""Minimum cuts between forward and backward, and the knapsack of what not to run again."""

from __future__ import annotations

import numpy as np
import pytest

from checkmate import Problem, Status
from checkmate.solvers.baselines.min_cut import SLOTS, cut, most_seconds, savable
from checkmate.solvers.common.schedules import kept_by_the_forward
from tests.solvers.checks import solve, subsets
from tests.solvers.steps import STEPS
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn


def reachable(problem: Problem, saved: set[int], banned: set[int]) -> bool:
    """Whether the backward gets what it reads from what is saved, without banned or pinned ops of the forward."""
    graph = problem.graph
    here = saved | set(graph.outputs) | {v for v, value in enumerate(graph.values) if value.producer is None}
    todo = [v for op in graph.ops[graph.forward_length :] for v in op.inputs]
    while todo:
        v = todo.pop()
        k = graph.values[v].producer
        if v in here or k >= graph.forward_length:
            continue
        if k in banned or graph.ops[k].pinned is not None:
            return False
        here.add(v)
        todo += graph.ops[k].inputs
    return True


def bytes_of(problem: Problem, values: set[int]) -> int:
    return int(problem.sizes[sorted(values - set(problem.graph.outputs))].sum())


@in_turn(seed=range(60))
def test_no_choice_saves_fewer_bytes_than_the_cut(seed: int) -> None:
    problem = random_problem(seed, most_ops=9)
    graph, rng = problem.graph, np.random.default_rng(seed)
    made = [v for op in graph.ops[: graph.forward_length] for v in op.outputs]
    for share in (0.0, 0.3, 0.6, 1.0):
        banned = {k for k in range(graph.forward_length) if rng.random() < share}
        saved = set(cut(problem, banned))
        assert reachable(problem, saved, banned)
        choices = [set(values) for values in subsets(made) if reachable(problem, set(values), banned)]
        least = min(bytes_of(problem, values) for values in choices)
        assert bytes_of(problem, saved) == least


@pytest.mark.parametrize("name", STEPS)
def test_what_is_banned_does_not_run_again(name: str) -> None:
    problem = STEPS[name]
    banned = savable(problem)[::2]
    again = kept_by_the_forward(problem, cut(problem, banned)).sum(axis=0) - 1
    assert not again[banned].any()
    assert again.any()


def test_of_two_minimum_cuts_the_one_nearer_to_the_backward_is_taken() -> None:
    """Saving op 0's value or op 2's takes as many bytes; with op 2's nothing runs again."""
    problem = Problem.from_dag([[], [0], [1], [2]], seconds=[1] * 4, sizes=[2, 3, 2, 1], forward=3)
    assert cut(problem, [0]) == [2]


@in_turn(seed=range(40))
def test_the_knapsack_is_full_of_the_most_seconds(seed: int) -> None:
    """It takes a little less than its allowance where sizes are rounded, and never more."""
    rng = np.random.default_rng(seed)
    seconds = dict(enumerate(rng.random(9)))
    weight = dict(enumerate(rng.integers(0, 20, 9).tolist()))
    for allowance in (0, 1, 17, 60, 500):
        picked = most_seconds(seconds, weight, allowance)
        fitting = [ks for ks in subsets(range(9)) if sum(weight[k] for k in ks) <= allowance]
        best = max(sum(seconds[k] for k in ks) for ks in fitting)
        assert sum(weight[k] for k in picked) <= allowance
        assert sum(seconds[k] for k in picked) == pytest.approx(best)
    weight = dict(enumerate(rng.integers(1, 10**9, 100).tolist()))
    allowance = sum(weight.values()) // 2
    picked = most_seconds(dict(enumerate(rng.random(100))), weight, allowance)
    assert (1 - 100 / SLOTS) * allowance < sum(weight[k] for k in picked) <= allowance


def test_without_a_backward_there_is_nothing_to_save() -> None:
    problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1] * 3, sizes=[1] * 3)
    assert savable(problem) == cut(problem, []) == []
    assert solve("min-cut", problem, 3).cost == 3.0
    assert solve("min-cut", problem, 2).status is Status.NOT_FOUND
