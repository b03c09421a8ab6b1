"""Checkpoints at every k-th candidate, or wherever enough bytes have come together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.checkpoint_places import articulation_points, linearized
from checkmate.solvers.baselines.chen import by_bytes, every_kth, kept, selections
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.runs import kept_by_the_forward, peak_of
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

NAMES = ("chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy")
SOLVERS = {name: METHODS[name].solve for name in NAMES}
chen_sqrt, chen_greedy, ap_sqrt, ap_greedy, linearized_sqrt, linearized_greedy = SOLVERS.values()
milp = METHODS["milp"].solve
STEPS = {"resnet": dags.resnet(), "unet": dags.unet(), "gpt": dags.gpt(4)}


def random_chain(seed: int, layers: int) -> Problem:
    """The chain of the golden optima with sizes and seconds drawn."""
    rng = np.random.default_rng(seed)
    unit = dags.unit_chain(layers)
    n = len(unit.graph.ops)
    deps = [list(op.inputs) for op in unit.graph.ops]
    seconds, sizes = rng.integers(1, 9, n).tolist(), rng.integers(1, 9, n).tolist()
    return Problem.from_dag(deps, seconds, sizes, outputs=[n - 1], forward=layers + 1)


def check(solution: Solution) -> None:
    assert solution.plan is not None
    assert solution.peak is not None
    assert simulator.verify(solution.plan, solution.problem, solution.budget) == []
    assert solution.peak == simulator.simulate(solution.plan, solution.problem).peak <= solution.budget


@pytest.mark.parametrize(("layers", "cost", "budget"), [(16, 45, 10), (32, 89, 14), (64, 185, 22)])
@pytest.mark.parametrize("method", [chen_sqrt, linearized_sqrt])
def test_the_known_figures_of_unit_chains(method: Callable[..., Solution], layers: int, cost: int, budget: int) -> None:
    solution = method(dags.unit_chain(layers), budget)
    assert solution.cost == cost
    check(solution)
    assert method(dags.unit_chain(layers), 10**6).cost == cost  # whatever the budget


@pytest.mark.parametrize("layers", [3, 4])
def test_unit_chains_against_the_optimum(layers: int) -> None:
    problem = dags.unit_chain(layers)
    for budget in range(3, problem.keep_all_peak + 1):
        best = milp(problem, budget, gap=0.0).cost
        for name, method in SOLVERS.items():
            assert method(problem, budget).cost >= best - 1e-9, name
    assert chen_greedy(problem, problem.keep_all_peak).status is Status.OPTIMAL


@in_turn(seed=range(6))
def test_chains_against_the_optimum(seed: int) -> None:
    problem = random_chain(seed, layers=4)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    for budget in np.linspace(low, high, 4).astype(int).tolist():
        best = milp(problem, budget, gap=0.0).cost
        for name, method in SOLVERS.items():
            solution = method(problem, budget)
            assert solution.method == name
            assert solution.cost >= best * (1 - 1e-9)
            if solution.plan is not None:
                check(solution)


@pytest.mark.slow
@in_turn(seed=range(30))
def test_greedy_is_the_best_choice_of_all_thresholds_by_brute_force(seed: int) -> None:
    """Every b from 0 to all bytes, one by one."""
    problem = random_chain(100 + seed, layers=6)
    outcomes = []
    for b in range(int(problem.sizes.sum()) + 1):
        since, checkpoints = 0, []
        for k in range(problem.graph.forward_length):
            since += int(problem.sizes[k])
            if since > b:
                checkpoints.append(k)
                since = 0
        R = kept_by_the_forward(problem, kept(problem, checkpoints))
        outcomes.append((float(R.sum(axis=0) @ problem.seconds), peak_of(problem, R)))
    for budget in {peak for _, peak in outcomes}:
        best = min(cost for cost, peak in outcomes if peak <= budget)
        assert chen_greedy(problem, budget).cost == linearized_greedy(problem, budget).cost == best
    least = min(peak for _, peak in outcomes)
    below = chen_greedy(problem, least - 1)
    assert (below.status, below.details["peak"]) == (Status.NOT_FOUND, least)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("method", [ap_greedy, linearized_greedy])
def test_greedy_finds_plans_on_general_graphs(method: Callable[..., Solution], name: str) -> None:
    problem = STEPS[name]
    costs = []
    for share in (0.7, 0.8, 1.0):
        solution = method(problem, int(share * problem.keep_all_peak), tries=24)
        check(solution)
        costs.append(solution.cost)
    assert problem.keep_all_cost == pytest.approx(costs[-1])
    assert costs[0] > costs[-1]
    assert costs[0] < 1.4 * costs[-1]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("method", "instead"), [(chen_sqrt, "ap-sqrt"), (chen_greedy, "ap-greedy")])
def test_where_the_forward_is_no_chain_it_says_so(method: Callable[..., Solution], instead: str, name: str) -> None:
    solution = method(STEPS[name], STEPS[name].keep_all_peak)
    assert solution.status is Status.NOT_FOUND
    assert "for chains, and this forward is none" in solution.message
    assert instead in solution.message


def test_sqrt_has_one_schedule_and_says_what_it_takes() -> None:
    problem = dags.unit_chain(16)
    needs = chen_sqrt(problem, 10).peak
    assert needs == 8
    refused = chen_sqrt(problem, needs - 1)
    assert (refused.status, refused.plan, refused.details["peak"]) == (Status.NOT_FOUND, None, needs)
    assert f"reaches is {needs} B," in refused.message
    assert "chen-greedy" in refused.message


@in_turn(seed=range(40))
def test_what_is_kept_is_what_reaches_the_backward(seed: int) -> None:
    """The checkpoints, all after the last of them, and what is always at hand; nothing else of the forward."""
    problem = random_problem(seed, most_ops=16)
    graph = problem.graph
    checkpoints = every_kth(linearized(problem))
    last = max(checkpoints, default=-1)
    here = kept(problem, checkpoints)
    for k, op in enumerate(graph.ops[: graph.forward_length]):
        for v in op.outputs:
            free = op.pinned is not None or v in graph.outputs or problem.sizes[v] == 0
            assert (v in here) == (k in checkpoints or k > last or free)
    assert all(graph.values[v].producer < graph.forward_length for v in here)


@in_turn(seed=range(40), name=SOLVERS)
def test_any_graph_has_an_answer(seed: int, name: str) -> None:
    problem = random_problem(seed, most_ops=14)
    for budget in (problem.keep_all_peak, (int(problem.unavoidable_bytes.max()) + problem.keep_all_peak) // 2):
        solution = SOLVERS[name](problem, budget)
        assert solution.method == name
        if solution.plan is not None:
            check(solution)
        else:
            assert (solution.status, bool(solution.message)) == (Status.NOT_FOUND, True)
    if name.endswith("-greedy") and "chains" not in solution.message:
        assert SOLVERS[name](problem, problem.keep_all_peak).cost == pytest.approx(problem.keep_all_cost)


def test_without_a_backward_all_is_kept() -> None:
    problem = Problem.from_dag([[k - 1] if k else [] for k in range(9)], [1] * 9, [1] * 9)
    for method in SOLVERS.values():
        assert method(problem, 2).status is Status.OPTIMAL
        assert method(problem, 1).details["peak"] == 2


def test_without_candidates_all_is_kept() -> None:
    problem = Problem.from_dag([[], [0], [0, 1], [0, 1, 2]], [1] * 4, [1] * 4, forward=3)
    assert articulation_points(problem) == ()
    assert ap_sqrt(problem, 4).cost == ap_greedy(problem, 4).cost == 4.0


def test_every_kth() -> None:
    assert [every_kth(range(n)) for n in (0, 1, 3, 4, 9)] == [(), (0,), (0, 1, 2), (1, 3), (2, 5, 8)]


def test_selections_are_all_there_are() -> None:
    rng = np.random.default_rng(0)
    for n in range(1, 12):
        filled = rng.integers(1, 20, n).cumsum().tolist()
        known = [by_bytes(filled, b)[0] for b in range(filled[-1] + 1)]
        assert selections(filled) == [chosen for chosen, _ in itertools.groupby(known)]
        few = selections(filled, most=4)
        assert len(few) <= 5
        assert few[0] == tuple(range(n))
        assert few[-1] == ()
        assert set(few) <= set(known)


def test_many_bytes_per_op_are_still_tried_in_bounded_time() -> None:
    """All tries are spent, and no more."""
    problem = random_chain(5, layers=120)
    solution = chen_greedy(problem, problem.keep_all_peak // 4, tries=20)
    check(solution)
    assert solution.details["selections"] > solution.details["tried"] == 20
