"""Binomial checkpointing of chains."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.solution import Status
from checkmate.solvers.baselines.checkpointing import linearized
from checkmate.solvers.baselines.griewank import least_steps, needs, reversal, stored
from checkmate.solvers.common.schedules import peak_of
from tests.solvers.checks import solve, wrong
from tests.solvers.steps import STEPS
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn


@cache
def fewest(steps: int, slots: int) -> float:
    """By definition: m steps forward, store, reverse the rest with one slot less, then the first m."""
    if steps == 1:
        return 0
    if slots == 0:
        return float("inf")
    return min(m + fewest(steps - m, slots - 1) + fewest(m, slots) for m in range(1, steps))


def test_the_formula_is_the_optimum_of_the_recursion_and_what_the_steps_take() -> None:
    """Walk through the reversal: each state needed is made by steps from the highest that is stored."""
    for steps in range(1, 36):
        for slots in range(1, steps + 1):
            at = stored(steps, slots)
            taken, here = 0, {0}
            for state in reversed(range(steps)):
                start = max(x for x in here if x <= state)
                taken += state - start
                here = {x for x in at[state] if x in here or x > start}  # those passed on the way, or there already
                assert here == set(at[state])
                assert len(at[state]) <= slots
            assert taken == least_steps(steps, slots) == fewest(steps, slots)
        assert least_steps(steps, steps + 1) == fewest(steps, steps + 1)


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


def test_the_largest_number_of_slots_that_fits_is_taken() -> None:
    problem = dags.unit_chain(50)
    for budget in (6, 11, 30):
        for tries in (200, 20):  # of 51
            solution = solve("griewank", problem, budget, tries=tries)
            assert solution.details["slots"] == budget - 2
            assert solution.cost == solution.details["least steps"] + 1 + 50


@pytest.mark.parametrize("candidates", ["ap", "linearized"])
def test_on_other_graphs_it_takes_other_candidates(candidates: str) -> None:
    for problem in (STEPS["resnet"], STEPS["unet"], STEPS["gpt"]):
        solution = solve("griewank", problem, int(0.7 * problem.keep_all_peak), candidates=candidates, tries=24)
        assert solution.status is Status.FEASIBLE
        assert solution.cost > problem.keep_all_cost
    with pytest.raises(ValueError, match=r"no candidates 'tree'\. There are chain, ap, linearized"):
        solve("griewank", dags.unit_chain(3), 5, candidates="tree")


@in_turn(seed=range(40))
def test_any_line_and_any_number_of_slots_give_a_schedule(seed: int) -> None:
    problem = random_problem(seed, most_ops=14)
    rng = np.random.default_rng(seed)
    line = tuple(k for k in linearized(problem) if rng.random() < 0.7)
    needed = needs(problem, line)
    steps = 1 + max(needed.values(), default=0)
    for slots in range(1, steps + 1):
        R = reversal(problem, line, needed, stored(steps, slots))
        assert wrong(problem, R) == []
