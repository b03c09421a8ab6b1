"""Next use, and the eviction passes it is made of."""

from __future__ import annotations

import numpy as np
import pytest

from checkmate import Problem, Status
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.schedules import as_matrix
from checkmate.solvers.search.greedy import GRID, DeadEnd, Weights, run_pass
from tests.solvers.checks import solve, wrong
from tests.solvers.steps import STEPS, masked
from tests.support.oracle import PLAIN_AND_WAYS, Make
from tests.support.sampling import in_turn, long


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_plans_of_training_steps_verify(name: str, share: float) -> None:
    problem = STEPS[name]
    floor = int(problem.unavoidable_bytes.max())
    solution = solve("next-use", problem, int(floor + share * (problem.keep_all_peak - floor)), time_limit=2)
    assert solution.overhead < 0.35


@in_turn(make=PLAIN_AND_WAYS, seed=[*range(15), *map(long, range(15, 40))])
def test_the_memory_that_a_pass_counts_is_never_below_the_simulators(make: Make, seed: int) -> None:
    problem = make(1000 + seed, most_ops=16)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    for budget in {low, (low + high) // 2, high}:
        for weights in GRID[::5]:
            stages = run_pass(Tables.of(problem), budget, weights)
            assert isinstance(stages, DeadEnd) or wrong(problem, as_matrix(stages), budget) == []


def test_the_plan_of_the_first_pass_is_offered_at_once() -> None:
    """It names the op in the way where no pass fits."""
    problem, tables = STEPS["mobilenet"], Tables.of(STEPS["mobilenet"])
    budget = int(0.7 * problem.keep_all_peak)
    passes = [run_pass(tables, budget, weights) for weights in GRID]
    first, *others = [tables.seconds_of(stages) for stages in passes if not isinstance(stages, DeadEnd)]
    assert first > min(others)
    _, cost, _ = solve("next-use", problem, budget).details["trajectory"][0]
    assert cost == pytest.approx(first)
    solution = solve("next-use", problem, int(problem.unavoidable_bytes.max()) // 2)
    assert solution.status is Status.NOT_FOUND
    assert problem.graph.ops[solution.stuck].name in solution.message


# Op 2 has no room beside all three: either what it reads goes with it, or the value of op 0.
SHORT = {"deps": [[], [], [1], [0, 1, 2]], "sizes": [4, 4, 4, 0], "workspace": [0, 0, 4, 0], "over": {2: [1]}}


AGAIN = {
    "a mask that nobody reads again is kept to bring back what is made of it": (masked(4, mask=1), 8, [0, 1, 0, 0, 0]),
    "where it cannot stay what a pinned op made does": (masked(4, mask=8), 12, [0, 0, 0, 0, 0]),
    "what is needed later goes with the run that writes over it": (
        Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [8, 8, 1, 1], over={1: [0]}), 10, [1, 0, 0, 0]
    ),
    "what is written over is made again where it is cheaper": (
        Problem.from_dag(seconds=[1, 9, 1, 1], **SHORT), 12, [1, 0, 0, 0]
    ),
    "and what is not where that is": (Problem.from_dag(seconds=[9, 1, 1, 1], **SHORT), 12, [0, 1, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAIN)
def test_what_runs_again(case: str) -> None:
    problem, budget, again = AGAIN[case]
    assert solve("next-use", problem, budget).schedule.recomputed.tolist() == again
    if not any(again):
        assert solve("next-use", problem, budget - 1).status is Status.NOT_FOUND


def test_a_guide_decides_what_goes_first() -> None:
    problem = Problem.from_dag([[], [], [], [2], [0, 1, 3]], [1] * 5, [2, 2, 2, 1, 1], outputs=[4])
    for first in (0, 1):
        stages = run_pass(Tables.of(problem), 6, Weights(outside=np.tile(np.arange(5) == first, (4, 1))))
        assert not isinstance(stages, DeadEnd)
        assert stages[4] == [first, 4]
