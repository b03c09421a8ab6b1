"""What must be at hand, as bits: against plain sets, and against what simulated schedules hold."""

from __future__ import annotations

import numpy as np
import pytest

from checkmate import plan as plans
from checkmate.problem import Problem
from checkmate.schedule import Schedule
from checkmate.solvers.certify import peak_of
from checkmate.solvers.needs import Needs
from tests import dags
from tests.oracle import all_schedules, random_problem


def as_bits(needs: Needs, values: set[int]) -> int:
    return sum(needs.bit.get(v, 0) for v in values)


@pytest.mark.parametrize("seed", range(30))
def test_bytes_of_sets(seed: int) -> None:
    problem = random_problem(seed, most_ops=9)
    needs = Needs(problem)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        some = {v for v in needs.values if rng.random() < 0.5}
        assert needs.bytes_of(as_bits(needs, some)) == sum(int(problem.sizes[v]) for v in some)


def test_a_grain_leaves_out_what_is_small_and_results_and_what_nobody_reads() -> None:
    problem = Problem.from_dag([[], [0], [0], [1]], seconds=[1] * 4, sizes=[8, 2, 4, 16], outputs=[3])
    assert Needs(problem).values == [0, 1]
    assert Needs(problem, grain=2).values == [0]
    assert Needs(problem).working == [0, 0, 4, 16]


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_holds_less_than_is_needed_and_owed(seed: int) -> None:
    """At each run of each schedule the bytes are at least those of what later runs need, and of what is owed."""
    problem = random_problem(seed, most_ops=4)
    needs = Needs(problem)
    for schedule in all_schedules(problem):
        plan = plans.lower(problem.graph, schedule)
        if plans.verify(plan, problem):
            continue
        usage = plans.simulate(plan, problem)
        at_hand: set[int] = set()
        stage, runs = 0, iter(usage.bytes_at)
        for i, step in enumerate(plan.steps):
            if isinstance(step, plans.Free):
                at_hand.discard(step.value)
                continue
            after = at_hand.union(problem.graph.ops[step.op].outputs)
            for free in plan.steps[i + 1 :]:
                if isinstance(free, plans.Run):
                    break
                after.discard(free.value)
            assert needs.at(stage, step.op, as_bits(needs, after)) <= next(runs)
            at_hand.update(problem.graph.ops[step.op].outputs)
            stage += step.op == stage


def test_from_scratch_is_what_a_run_of_the_forward_takes() -> None:
    chain = Problem.from_dag([[], [0], [1], [2]], seconds=[1] * 4, sizes=[5, 1, 3, 2])
    needs = Needs(chain)
    assert needs.from_scratch(needs.bit[2]).peak == 6
    assert needs.from_scratch(needs.bit[2] | needs.bit[0]).peak == 9
    assert needs.from_scratch(0).peak == 0


def test_what_pinned_ops_leave_behind_is_owed_until_the_last_use_of_what_is_made_from_it() -> None:
    problem = dags.gpt(2)
    needs = Needs(problem)
    pinned = [v for v in needs.values if problem.graph.ops[needs.tables.producer[v]].pinned]
    t = problem.graph.forward_length
    direct = sum(int(problem.sizes[v]) for v in pinned if problem.graph.users[v][-1] >= t)
    assert direct < needs.owed(t, 0) <= sum(int(problem.sizes[v]) for v in pinned)
    assert needs.owed(t, as_bits(needs, set(pinned))) == 0


def test_base_is_resident_and_results() -> None:
    problem = dags.vgg(4)
    once = Schedule.from_runs(problem.graph, np.eye(len(problem.graph.ops), dtype=bool))
    needs = Needs(problem)
    assert needs.base[0] == problem.resident
    assert needs.base[-1] <= peak_of(problem, once.R)
    made = sum(int(problem.sizes[v]) for v in problem.graph.outputs if (problem.graph.values[v].producer or 0) < 9)
    assert needs.base[9] == problem.resident + made
