"""The search backwards: every plan it finds fits, and every refutation is true."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Clock, OutOfTime, certify
from checkmate.solvers.common.schedules import peak_of
from checkmate.solvers.search.backward_search import find_plan, refute
from checkmate.solvers.search.value_sets import ValueSets
from tests.support.oracle import PLAIN_AND_WAYS, Make, drawn, outcomes
from tests.support.sampling import in_turn, long

FOREVER = Clock()


@in_turn(make=PLAIN_AND_WAYS, first=[2000, 2010, *map(long, range(2020, 2080, 10))])
def test_the_exact_search_finds_a_plan_exactly_where_there_is_one(make: Make, first: int) -> None:
    for problem in drawn(make, range(first, first + 10), larger=10):
        truth, sets = min(peak for _, peak in outcomes(problem)), ValueSets(problem)
        R, _ = find_plan(sets, truth, width=10**6, clock=FOREVER, exact=True)
        assert peak_of(problem, R) == truth
        R, search = find_plan(sets, truth - 1, width=10**6, clock=FOREVER, exact=True)
        assert (R, search.complete) == (None, True)
        assert search.least <= truth


@pytest.mark.slow
@in_turn(make=PLAIN_AND_WAYS, width=[1, 3, 1000], first=[3000, *map(long, (3020, 3040, 3060))])
def test_plans_fit_and_refutations_are_true_at_any_width(make: Make, first: int, width: int) -> None:
    refuted = 0
    for problem in drawn(make, range(first, first + 20)):
        for sets, budget, truth, proven in refutations(problem, width):
            R, search = find_plan(sets, budget, width=width, clock=FOREVER)
            assert R is None or certify(problem, budget, R, method="backwards").peak >= truth
            assert R is not None or not search.complete or budget < truth
            refuted += proven
    assert refuted > 20


def refutations(problem: Problem, width: int) -> Iterator[tuple[ValueSets, int, int, bool]]:
    """Budgets around the smallest peak of all schedules, and whether it is proven of them that nothing fits."""
    truth, sets = min(peak for _, peak in outcomes(problem)), ValueSets(problem)
    for budget in range(truth - 4, truth + 3):
        proofs = [refute(sets, budget, t, width=width, clock=FOREVER) for t in range(sets.T)]
        assert all(proof is None or budget < proof <= truth for proof in proofs)
        yield sets, budget, truth, any(proof is not None for proof in proofs)


@pytest.mark.parametrize(
    "make", [partial(dags.vgg, 8), partial(dags.resnet, (1, 1)), partial(dags.unet, 2), partial(dags.gpt, 2)]
)
def test_plans_of_training_steps_fit(make: Make) -> None:
    problem = make()
    budget = int(1.1 * problem.unavoidable_bytes.max())
    R, _ = find_plan(ValueSets(problem), budget, width=8, clock=FOREVER)
    assert certify(problem, budget, R, method="backwards").peak <= budget


def test_the_clock_ends_it() -> None:
    sets = ValueSets(dags.unet(2))
    with pytest.raises(OutOfTime):
        find_plan(sets, 10**12, width=8, clock=Clock(0.0))
