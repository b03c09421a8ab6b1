"""From what is kept to what runs."""

from __future__ import annotations

import numpy as np

from benchmarks.networks import dags
from checkmate import Problem, Schedule
from checkmate.solvers.common.schedules import kept_by_the_forward, on_demand
from tests.solvers.checks import runs
from tests.support.oracle import random_problem
from tests.support.paper_equations import violations
from tests.support.sampling import in_turn


def test_a_segment_runs_again_at_once_and_stays() -> None:
    """Two segments of a chain: each is made anew as a whole, when the backward comes to its end.

    Nothing runs again where everything is kept.
    """
    chain, problem = dags.unit_chain(6), dags.unet(2)
    again = runs(chain, (7, 4), (7, 5), (10, 1), (10, 2))
    assert np.array_equal(kept_by_the_forward(chain, [0, 3, 6]), again)
    assert np.array_equal(kept_by_the_forward(problem, range(len(problem.graph.values))), runs(problem))


def test_pinned_values_are_kept_whatever_is_asked() -> None:
    problem = dags.gpt(1)
    R = kept_by_the_forward(problem, [])
    pinned = [k for k, op in enumerate(problem.graph.ops) if op.pinned is not None]
    assert pinned
    assert (R[:, pinned].sum(axis=0) == 1).all()
    assert (R.sum(axis=0) > 1).any()


@in_turn(seed=range(20))
def test_any_choice_gives_a_schedule_that_needs_no_more_than_was_kept(seed: int) -> None:
    problem: Problem = random_problem(seed, most_ops=6)
    rng = np.random.default_rng(seed)
    T, V = len(problem.graph.ops), len(problem.graph.values)
    kept_after = {t: np.flatnonzero(rng.random(V) < 0.5).tolist() for t in range(0, T, 2)}
    R = on_demand(problem, kept_after)
    schedule = Schedule.from_runs(problem.graph, R)
    assert violations(schedule, problem) == []
    pinned = {v for op in problem.graph.ops if op.pinned is not None for v in op.outputs}
    for t, kept in kept_after.items():
        if t + 1 < T:
            assert set(np.flatnonzero(schedule.S[t + 1])) <= set(kept) | set(problem.graph.outputs) | pinned
