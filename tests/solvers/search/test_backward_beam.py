"""The search backwards that counts seconds: the optimum with every state, and on either side of it with few."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.simulator import lower_runs
from checkmate.solvers.common.incumbent import Clock, Incumbent, certify
from checkmate.solvers.common.schedules import as_matrix
from checkmate.solvers.search import backward_beam as module
from checkmate.solvers.search.backward_beam import Beam, backward_bound, prices
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.checks import begun
from tests.support.all_plans import fastest
from tests.support.oracle import PLAIN_AND_WAYS, Make, drawn, optima, random_problem
from tests.support.sampling import every, in_turn

MANY = 10**6  # states: more than there are


def beam(
    problem: Problem, budget: int, width: int, *, worth: float = 0.1, seconds: float = math.inf, any_order: bool = False
) -> Beam:
    sets = ValueSets(problem)
    price = prices(sets, budget, np.full(sets.T, worth))
    return Beam(sets, budget, width, price, Clock(seconds), any_order=any_order)


def small(make: Make, first: int, *, any_order: bool = False) -> Iterator[tuple[Problem, int, float]]:
    """Ten problems with their interesting budgets and the least seconds of a schedule, or of a plan of any order."""
    for problem in drawn(make, range(first, first + 10)):
        yield from ((problem, budget, best) for budget, best in (fastest if any_order else optima)(problem))


def cost_within(problem: Problem, budget: int, found: np.ndarray | list[list[int]]) -> float:
    """Seconds of a plan, which is verified."""
    plan = lower_runs(problem, found) if isinstance(found, list) else found
    return certify(problem, budget, plan, method="beam").cost


@in_turn(make=PLAIN_AND_WAYS, first=every(8, range(0, 80, 10)), width=[1, 2, 4, MANY], any_order=[False, True])
def test_never_above_the_optimum_and_exact_with_all_states(make: Make, first: int, width: int, any_order: bool) -> None:
    for problem, budget, best in small(make, first, any_order=any_order):
        for worth in (0.0, 0.3) if width < MANY else (0.1,):
            search = beam(problem, budget, width, worth=worth, any_order=any_order)
            seconds, found = search.bound()
            seconds += problem.keep_all_cost
            assert seconds <= best + 1e-9
            assert found is None or cost_within(problem, budget, found) == pytest.approx(seconds)
            if width == MANY:
                assert search.complete
                assert (seconds, found is None) == (pytest.approx(best), best == math.inf)


def test_merging_happens_in_the_tests_above_and_loses_something() -> None:
    """The bound of few states is below that of all. A search for less than the optimum proves what it looked for."""
    chain = dags.unit_chain(8)
    found = [beam(chain, 4, width) for width in (1, 4, 16, MANY)]
    bounds = [search.bound()[0] for search in found]
    assert [search.complete for search in found] == [False, False, False, True]
    assert bounds[0] < bounds[-1] == 26 - chain.keep_all_cost
    assert all(bound <= bounds[-1] for bound in bounds)
    search = beam(chain, 5, MANY)
    search.most = 22 - chain.keep_all_cost
    assert search.bound() == (search.most, None)
    assert beam(chain, 4, 8, seconds=0.0).search() is None
    assert beam(chain, 4, 8, seconds=0.0).bound() == (0.0, None)


@pytest.mark.parametrize(("layers", "budget", "best"), [(8, 3, 45), (8, 5, 22), (16, 4, 67), (16, 5, 53), (16, 6, 47)])
def test_known_optima_of_unit_chains(layers: int, budget: int, best: int) -> None:
    chain = dags.unit_chain(layers)
    seconds, found = beam(chain, budget, MANY).bound()
    assert sum(map(len, found)) == best == chain.keep_all_cost + seconds


@pytest.mark.parametrize("first", every(8, range(0, 80, 10)))
def test_plans_fit_and_are_no_dearer_than_the_known_one(first: int) -> None:
    for problem, budget, best in small(random_problem, first):
        start = beam(problem, budget, MANY).bound()[1]
        for width in (1, 3) if start else ():
            alone = beam(problem, budget, width).search()
            assert alone is None or cost_within(problem, budget, alone) >= best - 1e-9
            beside = beam(problem, budget, width).search(as_matrix(start))
            assert cost_within(problem, budget, beside) == pytest.approx(best)


def test_a_price_is_what_keeping_takes_or_making_again() -> None:
    """The chain's first value: kept at 0.1 for each stage after the next, or made again in 1 second."""
    chain = dags.unit_chain(8)
    sets = ValueSets(chain)
    price = prices(sets, chain.keep_all_peak, np.full(sets.T, 0.1))
    assert price[0, 1] == 0.0
    assert price[0, 5] == pytest.approx(0.4)
    assert price[0, -1] == pytest.approx(1.0)


def run(
    problem: Problem, budget: int, *, start: np.ndarray | None = None, seconds: float = math.inf, **options: Any
) -> Incumbent:
    incumbent = begun(problem, budget, seconds)
    assert start is None or incumbent.offer(start, "start")
    backward_bound(incumbent.task, incumbent, **options)
    return incumbent


@in_turn(first=every(8, range(0, 80, 10)), grain=[module.GRAIN, 0.3])
def test_never_above_the_optimum(first: int, grain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a coarse grain much is left out: the bound is lower then, and what breaks the budget is not taken."""
    monkeypatch.setattr(module, "GRAIN", grain)
    for problem, budget, best in small(random_problem, first, any_order=True):
        found = run(problem, budget, widths=(1, 3, 1000))
        assert found.bound - 1e-9 <= best <= found.cost + 1e-9
        if grain < 0.01 and best < math.inf:
            assert found.cost == pytest.approx(best)


def test_proofs_of_chains() -> None:
    """A known plan is proven to be the best, and that nothing fits; without time nothing is proven."""
    chain, large = dags.unit_chain(8), run(dags.unit_chain(16), 5)  # for which the exact model takes minutes
    assert large.cost == large.bound == 53
    again = run(chain, 4, start=run(chain, 4).R)
    assert again.cost == again.bound == 26
    assert run(chain, 2).is_infeasible
    assert run(chain, 4, seconds=0.0).bound == chain.keep_all_cost


@pytest.mark.parametrize(("proven", "tried"), [(33.0, [16, 32]), (40.0, [16, 32]), (43.0, [16])])
def test_ends_where_another_bound_is_far_ahead(proven: float, tried: list[int]) -> None:
    """For a chain of 33 ops, which takes 53 seconds, 16 states prove 35."""
    incumbent = begun(dags.unit_chain(16), 5)
    incumbent.prove(proven)
    with patch.object(Beam, "bound", autospec=True, side_effect=Beam.bound) as bound:
        backward_bound(incumbent.task, incumbent, widths=(16, 32))
    assert [call.args[0].width for call in bound.call_args_list] == tried
