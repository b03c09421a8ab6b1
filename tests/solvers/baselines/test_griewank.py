"""Binomial checkpointing of chains."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.checkpoint_places import linearized
from checkmate.solvers.baselines.griewank import least_steps, needs, reversal, stored
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.runs import peak_of
from tests.solvers.baselines.test_chen import random_chain
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

griewank = METHODS["griewank"].solve
milp = METHODS["milp"].solve

GOLDEN = {8: {3: 45, 4: 26, 5: 22, 6: 21, 8: 19}, 16: {8: 43, 10: 41, 12: 39}}  # integer optima of unit chains
STEPS = {"resnet": dags.resnet(), "unet": dags.unet(), "gpt": dags.gpt(4)}


def check(solution: Solution) -> None:
    assert solution.plan is not None
    assert solution.peak is not None
    assert simulator.verify(solution.plan, solution.problem, solution.budget) == []
    assert solution.peak == simulator.simulate(solution.plan, solution.problem).peak <= solution.budget


@cache
def fewest(steps: int, slots: int) -> float:
    """By definition: m steps forward, store, reverse the rest with one slot less, then the first m."""
    if steps == 1:
        return 0
    if slots == 0:
        return float("inf")
    return min(m + fewest(steps - m, slots - 1) + fewest(m, slots) for m in range(1, steps))


def test_the_formula_is_the_optimum_of_the_recursion() -> None:
    for steps in range(1, 36):
        for slots in range(1, steps + 2):
            assert least_steps(steps, slots) == fewest(steps, slots)


def test_what_is_stored_takes_the_slots_and_the_steps_of_the_formula() -> None:
    """Walk through the reversal: each state needed is made by steps from the highest that is stored."""
    for steps in range(1, 40):
        for slots in range(1, steps + 1):
            at = stored(steps, slots)
            taken, here = 0, {0}
            for state in reversed(range(steps)):
                start = max(x for x in here if x <= state)
                taken += state - start
                here = {x for x in at[state] if x in here or x > start}  # those passed on the way, or there already
                assert here == set(at[state])
                assert len(at[state]) <= slots
            assert taken == least_steps(steps, slots)


@pytest.mark.parametrize("layers", [1, 2, 5, 9, 14])
def test_forward_executions_on_unit_chains_are_those_of_the_formula(layers: int) -> None:
    """The last forward op, with which the first reversal begins, is not counted: l - 1 is the state before it."""
    problem = dags.unit_chain(layers)
    line = linearized(problem)
    needed = needs(problem, line)
    steps = 1 + max(needed.values())
    assert steps == layers + 1
    for slots in range(1, steps + 1):
        R = reversal(problem, line, needed, stored(steps, slots))
        assert R[:, :layers].sum() == least_steps(steps, slots)
        assert (R[:, layers:].sum(axis=0) == 1).all()
        assert peak_of(problem, R) <= slots + 2


@pytest.mark.parametrize(("layers", "budget"), [(layers, budget) for layers in GOLDEN for budget in GOLDEN[layers]])
def test_the_integer_optima_of_unit_chains(layers: int, budget: int) -> None:
    solution = griewank(dags.unit_chain(layers), budget)
    check(solution)
    assert solution.cost == GOLDEN[layers][budget]
    assert solution.details["slots"] == budget - 2
    assert solution.cost == solution.details["least steps"] + 1 + layers


@in_turn(seed=range(6))
def test_chains_of_different_costs_against_the_optimum(seed: int) -> None:
    problem = random_chain(seed, layers=4)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    for budget in np.linspace(low, high, 4).astype(int).tolist():
        solution = griewank(problem, budget)
        assert solution.cost >= milp(problem, budget, gap=0.0).cost * (1 - 1e-9)
        if solution.plan is not None:
            check(solution)
    assert griewank(problem, high).cost == problem.keep_all_cost


def test_more_slots_are_cheaper_on_a_unit_chain_and_the_largest_number_that_fits_is_taken() -> None:
    problem = dags.unit_chain(50)
    for budget in (6, 11, 30):
        assert griewank(problem, budget, tries=200).details["slots"] == budget - 2
        assert griewank(problem, budget, tries=20).details["slots"] == budget - 2  # not all are tried


@pytest.mark.parametrize("name", STEPS)
def test_where_the_forward_is_no_chain_it_says_so_and_offers_another_use(name: str) -> None:
    problem = STEPS[name]
    refused = griewank(problem, problem.keep_all_peak)
    assert refused.status is Status.NOT_FOUND
    assert "for chains, and this forward is none" in refused.message
    for candidates in ("ap", "linearized"):
        assert f"candidates='{candidates}'" in refused.message
        solution = griewank(problem, int(0.7 * problem.keep_all_peak), candidates=candidates, tries=24)
        check(solution)
        assert (solution.method, solution.status) == ("griewank", Status.FEASIBLE)
        assert solution.cost > problem.keep_all_cost


@in_turn(seed=range(40))
def test_any_line_and_any_number_of_slots_give_a_schedule(seed: int) -> None:
    problem = random_problem(seed, most_ops=14)
    rng = np.random.default_rng(seed)
    line = tuple(k for k in linearized(problem) if rng.random() < 0.7)
    needed = needs(problem, line)
    steps = 1 + max(needed.values(), default=0)
    for slots in range(1, steps + 1):
        R = reversal(problem, line, needed, stored(steps, slots))
        assert Schedule.from_runs(problem.graph, R).violations(problem) == []


def test_with_a_slot_for_each_state_nothing_runs_twice() -> None:
    """A checkpoint that two backward ops read stays until the second: norms read what they made and what they read."""
    problem = dags.vgg(8)
    assert griewank(problem, problem.keep_all_peak).cost == pytest.approx(problem.keep_all_cost)


def test_where_nothing_fits_it_names_the_smallest_peak() -> None:
    refused = griewank(dags.unit_chain(5), 2)
    assert (refused.status, refused.details["peak"]) == (Status.NOT_FOUND, 3)
    assert "reaches is 3 B" in refused.message


def test_unknown_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no candidates 'tree'\. There are chain, ap, linearized"):
        griewank(dags.unit_chain(3), 5, candidates="tree")
