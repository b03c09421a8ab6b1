"""Plans in which what the backward misses is made again once: what each takes is what the simulator says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkmate import Problem, solve
from checkmate.solvers.common.schedules import cost_of, kept_by_the_forward, peak_of
from checkmate.solvers.kept_ops import Choice, KeptOps, fewest_seconds, least_peak
from tests.solvers.checks import subsets, wrong
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

PROBLEMS = Path(__file__).parents[2] / "benchmarks" / "problems"


def _check(problem: Problem, choice: Choice) -> None:
    values = [v for k in choice.kept for v in problem.graph.ops[k].outputs]
    R = kept_by_the_forward(problem, values)
    assert (wrong(problem, R), peak_of(problem, R)) == ([], choice.peak)
    assert cost_of(problem, R) == pytest.approx(problem.keep_all_cost + choice.seconds)


@in_turn(seed=range(60))
def test_each_plan_takes_what_the_simulator_says_and_the_cheapest_of_few_ops_is_found(seed: int) -> None:
    problem = random_problem(seed, most_ops=11)
    plans = KeptOps(problem)
    every = [plans.of(ops) for ops in subsets(plans.free)]
    for choice in every[:: 1 + len(every) // 30]:
        _check(problem, choice)
    least = min(choice.peak for choice in every)
    assert least_peak(plans).peak == least
    assert fewest_seconds(plans, least - 1) is None
    for budget in {choice.peak for choice in every}:
        found, best = fewest_seconds(plans, budget), min(c.seconds for c in every if c.peak <= budget)
        assert (found.peak <= budget, found.seconds) == (True, pytest.approx(best))


@pytest.mark.long
def test_it_finds_what_a_cut_of_the_saved_bytes_does_not() -> None:
    """A U-Net near its smallest budget: no minimum cut fits; and where one does, it takes no fewer seconds."""
    problem = Problem.from_json(PROBLEMS / "unet.json.gz")
    problem = replace(problem, profile=replace(problem.profile, ways=()))
    plans = KeptOps(problem)
    least = least_peak(plans)
    assert solve(problem, least.peak, method="min-cut", progress=False).plan is None
    for share in (0.3, 0.7):
        budget = int(least.peak + share * (plans.everything.peak - least.peak))
        found, by_cut = fewest_seconds(plans, budget), solve(problem, budget, method="min-cut", progress=False)
        _check(problem, found)
        assert found.peak <= budget
        assert by_cut.plan is None or problem.keep_all_cost + found.seconds <= by_cut.cost + 1e-12
