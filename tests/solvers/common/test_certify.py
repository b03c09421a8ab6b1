"""Nothing leaves a solver that the verifier refuses."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Status
from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import certify

CHAIN = dags.unit_chain(2)  # five ops, keeping all takes 5 s and 4 bytes
ONCE = np.eye(5, dtype=bool)


def test_a_right_schedule_gets_the_simulators_figures() -> None:
    solution = certify(CHAIN, 10, ONCE, method="test", message="as is")
    assert solution.plan is not None
    assert solution.cost == simulator.cost(solution.plan, CHAIN) == 5.0
    assert solution.peak == simulator.simulate(solution.plan, CHAIN).peak == CHAIN.keep_all_peak
    assert (solution.method, solution.message, solution.budget) == ("test", "as is", 10)


def test_running_each_op_once_is_optimal_by_itself() -> None:
    assert certify(CHAIN, 10, ONCE, method="test").status is Status.OPTIMAL


def test_a_bound_below_the_cost_leaves_a_gap() -> None:
    R = ONCE.copy()
    R[3, 0] = True
    solution = certify(CHAIN, 10, R, method="test", bound=5.5)
    assert (solution.status, solution.cost, solution.bound) == (Status.FEASIBLE, 6.0, 5.5)
    assert solution.gap == pytest.approx(0.5 / 6)


@pytest.mark.parametrize(("bound", "expected"), [(0.0, 5.0), (5.5, 5.5), (6.0001, 6.0), (float("nan"), 5.0)])
def test_the_bound_is_at_least_each_op_once_and_at_most_the_cost(bound: float, expected: float) -> None:
    R = ONCE.copy()
    R[3, 0] = True
    assert certify(CHAIN, 10, R, method="test", bound=bound).bound == expected


@pytest.mark.parametrize("bound", [6.1, float("inf")])
def test_a_bound_that_the_schedule_contradicts_proves_nothing(bound: float) -> None:
    R = ONCE.copy()
    R[3, 0] = True
    solution = certify(CHAIN, 10, R, method="test", bound=bound)
    assert (solution.status, solution.bound) == (Status.FEASIBLE, 5.0)


def test_a_schedule_over_the_budget_is_refused() -> None:
    with pytest.raises(SolverError, match=r"test is wrong: the peak of .* exceeds the budget"):
        certify(CHAIN, CHAIN.keep_all_peak - 1, ONCE, method="test")


def test_a_schedule_that_leaves_an_op_out_is_refused() -> None:
    R = ONCE.copy()
    R[2, 2] = False
    with pytest.raises(SolverError, match="more"):
        certify(CHAIN, 10, R, method="test")


def test_a_pinned_op_that_runs_twice_is_refused() -> None:
    graph = Graph(
        (Op("a", "f", (), (0,), pinned="draws random numbers"), Op("b", "f", (0,), (1,)), Op("c", "f", (0, 1), (2,))),
        (Value("x", 1, 0), Value("y", 1, 1), Value("z", 1, 2)),
        (2,),
    )
    R = np.eye(3, dtype=bool)
    R[2, 0] = True
    with pytest.raises(SolverError, match="draws random numbers"):
        certify(Problem(graph, Profile(np.ones(3), np.zeros(3))), 10, R, method="test")
