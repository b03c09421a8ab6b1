"""The smallest budget from both sides: brute force, known chains, training steps, and the time it takes."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from benchmarks.networks import dags
from checkmate import Problem, Profile, Status, min_budget, solve
from checkmate.solvers.common.incumbent import Clock
from checkmate.solvers.common.schedules import peak_of
from checkmate.solvers.search import min_budget as least
from checkmate.solvers.search.min_budget import MinBudget, bottleneck, least_memory, least_plan
from checkmate.units import exact_bytes
from tests.solvers.checks import takes_less_than, wrong
from tests.support.all_plans import smallest_peak
from tests.support.oracle import PLAIN_AND_WAYS, Make, drawn, outcomes, pinned
from tests.support.sampling import every, in_turn, long

STEPS = {"vgg": dags.vgg, "resnet": dags.resnet, "mobilenet": dags.mobilenet, "unet": dags.unet, "gpt": dags.gpt}


@pytest.mark.slow
@in_turn(make=PLAIN_AND_WAYS, block=[*range(2), *map(long, range(2, 10))])
def test_both_ends_are_the_smallest_peak_of_all_plans(make: Make, block: int) -> None:
    for problem in drawn(make, range(12 * block, 12 * block + 12), larger=12):
        truth, of_schedules = smallest_peak(problem), min(peak for _, peak in outcomes(problem))
        assert min_budget(problem) == MinBudget(truth, truth)
        assert peak_of(problem, least_memory(problem)[1]) == of_schedules
        assert wrong(problem, least_plan(problem, truth, Clock()), truth) == []


@in_turn(make=PLAIN_AND_WAYS, block=every(5, range(10)))
def test_the_way_of_large_problems_encloses_the_truth(make: Make, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "MOST_OPS_EXACT", 0)
    monkeypatch.setattr(least, "_known", OrderedDict())
    monkeypatch.setattr(least, "WIDTHS", (1, 2, 8) if block % 2 else (8,))
    monkeypatch.setattr(least, "GRAIN", 0.2 * (block % 3))
    for problem in drawn(make, range(1000 + 12 * block, 1012 + 12 * block), larger=12):
        ends = min_budget(problem)
        assert ends.bound <= smallest_peak(problem) <= ends.peak
        assert wrong(problem, least_plan(problem, ends.peak, Clock()), ends.peak) == []


def test_the_chains_of_the_golden_optima_need_three_and_it_reads_well() -> None:
    for layers in (4, 8, 11, 40):  # the last one of 81 ops, not by the exact way
        found = min_budget(dags.unit_chain(layers))
        assert (found.peak, found.bound) == (3, 3)
    ends = MinBudget(peak=2000, bound=1500)
    assert (ends.gap, ends.proven, MinBudget(0, 0).gap) == (0.25, False, 0.0)
    assert str(ends) == "2.00 kB (no plan fits below 1.50 kB)"
    assert str(MinBudget(2000, 2000)) == "2.00 kB (no plan fits less)"


def test_a_mask_that_cannot_be_drawn_again_is_counted_though_nobody_reads_it_later() -> None:
    """Op 1 draws bits; they are read by op 2 only, which scales them, but what that makes is read in the end."""
    deps = [[], [0], [1], [0, 2], [3], [4], [5, 2]]
    problem = pinned(Problem.from_dag(deps, [1] * 7, [4, 2, 16, 4, 40, 1, 4], forward=6), 1)
    assert problem.unavoidable_bytes.max() == 44
    assert min_budget(problem) == MinBudget(46, 46)  # what ops 3 and 4 make, and the bits


@pytest.mark.parametrize("name", STEPS)
def test_the_ends_meet_on_training_steps(name: str) -> None:
    problem = dags.gpt(4) if name == "gpt" else STEPS[name]()
    ends = min_budget(problem)
    assert problem.unavoidable_bytes.max() <= ends.bound <= ends.peak < 0.7 * problem.keep_all_peak
    assert ends.gap <= 0.002
    peak, R = least_memory(problem)
    assert peak == ends.peak == peak_of(problem, R)
    assert R.sum(axis=0) @ problem.seconds < 3 * problem.keep_all_cost


@pytest.mark.slow
def test_a_budget_below_the_bound_is_refused_as_proven() -> None:
    problem = dags.unet()
    ends = min_budget(problem)
    assert ends.bound > problem.unavoidable_bytes.max()
    refused = solve(problem, ends.bound - 1, time_limit=1)
    assert (refused.status, refused.refusal.min_budget) == (Status.INFEASIBLE, ends.peak)
    assert refused.refusal.op == problem.graph.ops[bottleneck(problem)].name
    assert all(said in refused.message for said in (exact_bytes(ends.peak), "No plan fits below"))
    assert solve(problem, ends.peak, time_limit=1).peak <= ends.peak


def test_the_time_limit_holds_and_more_time_is_used() -> None:
    problem = dags.gpt(12)
    with takes_less_than(1.5):
        first = min_budget(problem, time_limit=0.2)
    second = min_budget(problem, time_limit=10)
    assert first.bound <= second.bound <= second.peak <= first.peak
    assert second.gap <= 0.002
    with takes_less_than(0.2):  # it is not looked for again
        assert min_budget(problem, time_limit=1) == second


def test_a_step_captured_again_has_the_same_smallest_budget_at_once() -> None:
    first, again = dags.unet(3), dags.unet(3)
    again = Problem(again.graph, Profile(2 * again.seconds, again.workspace, again.resident))
    ends = min_budget(first)
    assert min_budget(again, time_limit=0.0) == ends
    larger = Problem(again.graph, Profile(again.seconds, again.workspace, again.resident + 1))
    assert min_budget(larger).peak == ends.peak + 1


@pytest.mark.slow
def test_a_step_of_a_thousand_ops_takes_seconds() -> None:
    problem = dags.gpt(24)
    with takes_less_than(6):
        ends = min_budget(problem)
    assert ends.gap <= 0.002
    assert ends.peak < 0.45 * problem.keep_all_peak
