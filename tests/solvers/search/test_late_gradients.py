"""Gradients made late or twice: where that lowers the smallest budget, which ops run again, and nowhere else."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from checkmate import Graph, Problem, Profile, min_budget
from checkmate.solvers.common.incumbent import Clock
from checkmate.solvers.common.schedules import as_matrix, obeys_limits
from checkmate.solvers.search import late_gradients
from checkmate.solvers.search import min_budget as least
from checkmate.solvers.search.backward_search import find_plan
from checkmate.solvers.search.late_gradients import last_twice, late_results, second_runs
from checkmate.solvers.search.min_budget import small_plan
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.checks import wrong
from tests.solvers.steps import whole_step
from tests.support.oracle import outcomes, random_problem_with_overwrites
from tests.support.sampling import in_turn


def _random_step(seed: int) -> Graph:
    """A chain of layers with a weight gradient in front of each gradient that is passed on, of any sizes."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 5))
    deps, sizes = [[k - 1] if k else [] for k in range(layers)], rng.integers(1, 400, layers).tolist()
    weights, grad = [], layers - 1
    for x in reversed(range(layers)):
        deps += [sorted({x, grad})] * 2
        sizes += [int(rng.integers(1, 400)), sizes[x]]
        weights, grad = [*weights, len(deps) - 2], len(deps) - 1
    return Problem.from_dag(deps, [1] * len(deps), sizes, outputs=[*weights, grad], forward=layers).graph


def test_an_order_that_is_taken_has_a_lower_smallest_budget() -> None:
    taken = 0
    for graph in map(_random_step, range(60)):
        if (order := late_results(graph)) is not None:
            taken += 1
            T = len(graph.ops)
            assert sorted(order) == list(range(T))
            late, plain = (
                min_budget(Problem(one, Profile(np.ones(T), np.zeros(T)))) for one in (graph.in_order(order), graph)
            )
            assert (late.proven, plain.proven) == (True, True)
            assert late.peak < 0.99 * plain.peak
    assert 5 < taken < 60


def test_what_stands_before_an_op_that_must_run_once_stays() -> None:
    graph = next(graph for graph in map(_random_step, range(60)) if late_results(graph) is not None)
    last = replace(graph.ops[-1], pinned="overwrites a buffer")
    assert late_results(replace(graph, ops=(*graph.ops[:-1], last))) is None
    swapped = [*range(len(graph.ops) - 2), len(graph.ops) - 1, len(graph.ops) - 2]
    assert graph.in_order(swapped).in_order(swapped) == graph


def convolutional(layers: int, seed: int) -> Problem:
    """A clipped step: what its layers make is largest at the first, gradients of parameters at the last."""
    problem, rng = whole_step(layers, clipped=True), random.Random(seed)
    values = [*problem.graph.values]
    for v, value in enumerate(values):
        kind, *of = problem.graph.ops[value.producer].name.split() if value.producer is not None else ("parameter",)
        if kind in ("layer", "into"):
            size = int(1000 * 0.7 ** int(of[0]) * rng.uniform(0.8, 1.2)) + 1
        elif kind == "gradient":
            size = int(100 * 0.7 ** (layers - 1 - int(of[0])) * rng.uniform(0.8, 1.2)) + 1
        else:
            size = value.size_bytes
        values[v] = replace(value, size_bytes=size)
    return replace(problem, graph=replace(problem.graph, values=tuple(values)))


def test_gradients_run_again_where_their_updates_read_them() -> None:
    """Nothing runs again where updates follow their gradients."""
    problem = whole_step(4, clipped=True)
    names = [op.name for op in problem.graph.ops]
    everything, nothing = second_runs(problem, shares=(1.0, 0.0))
    assert nothing == {}
    assert {names[k]: names[stages.start] for k, stages in everything.items()} == {
        # what leads to the layer below runs again before the update of what it reads
        **{f"gradient {i}": f"update {i}" for i in range(4)},
        **{f"into {i}": f"update {i + 1}" for i in range(3)},
        "into 3": "update 3",
    }
    half = {names[k] for k in second_runs(problem, shares=(0.5,))[0]}
    assert {name for name in half if name.startswith("gradient")} == {"gradient 3", "gradient 2"}
    assert all(not homes for homes in second_runs(whole_step(6, clipped=False)))


@in_turn(layers=[6, 10], seed=range(3))
def test_the_narrowest_search_finds_the_least_budget(layers: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds only plans that say beforehand which gradients stay and which are made twice; its bound is the same."""
    monkeypatch.setattr(least, "_known", OrderedDict())
    monkeypatch.setattr(least, "WIDTHS", (1,))
    assert min_budget(convolutional(layers, seed)).proven


@pytest.mark.parametrize("block", range(2))
def test_plans_that_make_twice_are_among_all_schedules(block: int) -> None:
    tried = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = random_problem_with_overwrites(seed)
        ops = [replace(op, phase="backward" if k else "forward") for k, op in enumerate(problem.graph.ops)]
        problem = replace(problem, graph=replace(problem.graph, ops=tuple(ops)))
        if any(second_runs(problem)):
            known = {peak for _, peak in outcomes(problem)}
            found = check_plans(problem, [min(known) - 1, *known])
            assert not found[min(known) - 1]
            tried += sum(found.values())
    assert tried >= 5


@in_turn(seed=range(4))
def test_plans_that_make_twice_are_allowed(seed: int) -> None:
    problem = convolutional(3, seed)
    ends = min_budget(problem)
    assert ends.proven
    budgets = [ends.peak - 1, ends.peak, (ends.peak + problem.keep_all_peak) // 2]
    below, _, between = check_plans(problem, budgets).values()
    assert below == 0 < between


def shared(layers: int, seed: int) -> Problem:
    """Layers that run twice with the same weights, of any sizes: the weight gradients of the second time wait."""
    rng = np.random.default_rng(seed)
    deps: list[list[int]] = [[k - 1] if k else [] for k in range(2 * layers)]
    sizes, weight = rng.integers(5, 15, 2 * layers).tolist(), rng.integers(20, 40, layers).tolist()
    waits, grad, results = dict[int, int](), 2 * layers - 1, list[int]()
    for x in reversed(range(2 * layers)):
        deps += [sorted({max(0, x - 1), grad}), [grad]]
        sizes += [weight[x % layers], sizes[x]]
        made, grad = len(deps) - 2, len(deps) - 1
        if x >= layers:
            waits[x - layers] = made
        else:
            deps.append([waits[x], made])
            sizes.append(weight[x])
            results.append(len(deps) - 1)
    return Problem.from_dag(deps, [1] * len(deps), sizes, outputs=results, forward=2 * layers)


@in_turn(seed=range(4))
def test_what_is_made_last_is_made_twice_from_a_gradient_that_stays(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan runs again the ops of a way, in its stages, and no others of the backward; less waits in between."""
    monkeypatch.setattr(late_gradients, "SECONDS_LAST", 0.2)
    problem, begins = shared(6, seed), 12
    ways = last_twice(problem)
    assert ways
    assert [len(way) for way in ways] == sorted(len(way) for way in ways)
    budget = int(1.1 * min_budget(problem).peak)
    for way in ways:
        R = as_matrix(small_plan(problem, budget, Clock(), homes=way))
        assert wrong(problem, R, budget) == []
        again = [(t, k) for t, k in np.argwhere(R).tolist() if begins <= k < t]
        assert {k for _, k in again} == set(way)
        assert all(t in way[k] for t, k in again)


def check_plans(problem: Problem, budgets: list[int]) -> dict[int, int]:
    """How many plans are found within each budget; all are as the verifier wants them."""
    found = dict.fromkeys(budgets, 0)
    for budget in found:
        for homes in (*second_runs(problem), *last_twice(problem)):
            R, search = find_plan(ValueSets(problem), budget, width=4, clock=Clock(5.0), homes=homes)
            assert not search.complete  # it proves nothing of other plans
            if R is not None and obeys_limits(problem, R):
                found[budget] += 1
                assert not wrong(problem, R, budget)
    return found
