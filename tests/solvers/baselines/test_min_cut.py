"""Minimum cuts between forward and backward, and the knapsack of what not to run again."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.min_cut import SLOTS, candidates, cut, most_seconds
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.runs import kept_by_the_forward
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem
from tests.support.sampling import in_turn

min_cut = METHODS["min-cut"].solve

STEPS = {"vgg": dags.vgg(16), "resnet": dags.resnet(), "unet": dags.unet(), "gpt": dags.gpt(4)}


def check(solution: Solution) -> None:
    assert solution.plan is not None
    assert simulator.verify(solution.plan, solution.problem, solution.budget) == []
    assert solution.peak == simulator.simulate(solution.plan, solution.problem).peak <= solution.budget


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
        subsets = itertools.chain.from_iterable(itertools.combinations(made, n) for n in range(len(made) + 1))
        least = min(bytes_of(problem, set(values)) for values in subsets if reachable(problem, set(values), banned))
        assert bytes_of(problem, saved) == least


@pytest.mark.parametrize("name", STEPS)
def test_what_is_banned_does_not_run_again(name: str) -> None:
    problem = STEPS[name]
    banned = candidates(problem)[::2]
    again = kept_by_the_forward(problem, cut(problem, banned)).sum(axis=0) - 1
    assert not again[banned].any()
    assert again.any()


def test_of_two_minimum_cuts_the_one_nearer_to_the_backward_is_taken() -> None:
    """Saving op 0's value or op 2's takes as many bytes; with op 2's nothing runs again."""
    problem = Problem.from_dag([[], [0], [1], [2]], seconds=[1] * 4, sizes=[2, 3, 2, 1], forward=3)
    assert cut(problem, [0]) == [2]


@in_turn(seed=range(40))
def test_the_knapsack_is_full_of_the_most_seconds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = dict(enumerate(rng.random(9)))
    weight = dict(enumerate(rng.integers(0, 20, 9).tolist()))
    for allowance in (0, 1, 17, 60, 500):
        picked = most_seconds(seconds, weight, allowance)
        subsets = itertools.chain.from_iterable(itertools.combinations(range(9), n) for n in range(10))
        best = max(sum(seconds[k] for k in ks) for ks in subsets if sum(weight[k] for k in ks) <= allowance)
        assert sum(weight[k] for k in picked) <= allowance
        assert sum(seconds[k] for k in picked) == pytest.approx(best)


def test_the_knapsack_never_takes_more_than_its_allowance_where_sizes_are_rounded() -> None:
    rng = np.random.default_rng(0)
    weight = dict(enumerate(rng.integers(1, 10**9, 100).tolist()))
    allowance = sum(weight.values()) // 2
    picked = most_seconds(dict(enumerate(rng.random(100))), weight, allowance)
    assert (1 - 100 / SLOTS) * allowance < sum(weight[k] for k in picked) <= allowance


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_plans_of_training_steps_verify_and_recompute_little(name: str) -> None:
    problem = STEPS[name]
    for share, most in ((0.9, 0.015), (0.8, 0.03)):
        solution = min_cut(problem, int(share * problem.keep_all_peak))
        check(solution)
        assert 0 < solution.overhead < most


def test_with_room_for_all_nothing_runs_again() -> None:
    for problem in [*STEPS.values(), dags.unit_chain(5)]:
        solution = min_cut(problem, problem.keep_all_peak)
        assert solution.status is Status.OPTIMAL
        assert solution.cost == pytest.approx(problem.keep_all_cost)


@in_turn(seed=range(40))
def test_never_below_the_optimum_of_small_problems(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    known = outcomes(problem)
    for budget in interesting_budgets(known):
        solution = min_cut(problem, budget)
        assert solution.cost >= optimum(known, budget) - 1e-9
        if solution.plan is not None:
            check(solution)


def test_without_a_backward_there_is_nothing_to_save() -> None:
    problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1] * 3, sizes=[1] * 3)
    assert candidates(problem) == cut(problem, []) == []
    assert min_cut(problem, 3).cost == 3.0
    assert min_cut(problem, 2).status is Status.NOT_FOUND


def test_where_nothing_fits_it_says_what_would() -> None:
    solution = min_cut(dags.unet(), int(0.45 * dags.unet().keep_all_peak))
    assert solution.status is Status.NOT_FOUND
    assert "least peak takes" in solution.message


@pytest.mark.long
def test_a_thousand_ops_take_seconds() -> None:
    problem = dags.gpt(24)
    began = time.perf_counter()
    solution = min_cut(problem, int(0.6 * problem.keep_all_peak))
    assert time.perf_counter() - began < 15
    check(solution)
    assert solution.overhead < 0.12
