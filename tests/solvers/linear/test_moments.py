"""The moment bound: below every schedule, and often on the best; moments come where memory is seen to be tight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem, solve
from checkmate.solvers.common.schedules import cost_of, peak_of
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.moment_model import build
from checkmate.solvers.linear.moments import (
    EXACT,
    Bound,
    default_moments,
    lifted_runs,
    next_moments,
    where_it_breaks,
    where_runs_repeat,
)
from checkmate.solvers.linear.moments import moment_bound as bound_of
from checkmate.solvers.search.greedy import next_use
from tests.solvers.checks import begun, runs, takes_less_than
from tests.support.oracle import PLAIN_AND_WAYS, Make, best_within, optimum, outcomes, random_ruled_problem
from tests.support.paper_equations import violations
from tests.support.sampling import every, in_turn


def moment_bound(problem: Problem, budget: int, *, seconds: float = 10.0, **options: Any) -> Bound:
    incumbent = begun(problem, budget, seconds, gap=EXACT)
    bound = bound_of(incumbent.task, incumbent, **options)
    assert incumbent.bound >= bound.value * (1 - EXACT)  # it was told
    return bound


def by_turns(makes: Sequence[Make], seeds: range, most_ops: int) -> Iterator[tuple[int, Problem]]:
    """Problems of each kind in turn, with their seeds."""
    return ((seed, makes[seed % len(makes)](seed, most_ops=most_ops)) for seed in seeds)


@in_turn(first=every(5, range(0, 250, 25)))
def test_never_above_the_optimum(first: int) -> None:
    problems = (problem for _, problem in by_turns(CASES[:2], range(first, first + 25), 4))
    for problem, budget, best in best_within(problems):
        bound = moment_bound(problem, budget)
        assert bound.value <= best + 1e-6
        assert not bound.infeasible or best == math.inf
        if bound.schedule is not None:
            assert violations(bound.schedule, problem, budget) == []
            assert cost_of(problem, bound.schedule.R) == pytest.approx(best)


@pytest.mark.parametrize("first", every(4, range(300, 340, 10)))
def test_any_moments_give_a_bound(first: int) -> None:
    problems = (problem for _, problem in by_turns(CASES[:2], range(first, first + 10), 5))
    for problem, budget, best in best_within(problems):
        ops = range(len(problem.graph.ops)) if best < math.inf else ()
        for moments in (*itertools.combinations(ops, 1), *itertools.combinations(ops, 3)):
            bound = moment_bound(problem, budget, moments=moments, most=3)
            assert not bound.infeasible
            assert bound.value <= best + 1e-6


@pytest.mark.parametrize(("budget", "cost"), [(3, 45), (4, 26), (5, 22), (6, 21), (8, 19)])
def test_below_the_golden_optima_of_the_chain(budget: int, cost: int) -> None:
    value = moment_bound(dags.unit_chain(8), budget).value
    assert 17 < value <= cost + 1e-6
    assert moment_bound(dags.unit_chain(8), budget, moments=[8]).value <= value + 1e-6


def test_more_moments_prove_no_less() -> None:
    problem = dags.mobilenet(6)
    budget = int(0.6 * problem.keep_all_peak)
    first = default_moments(problem)
    few = moment_bound(problem, budget, moments=first, most=len(first)).value
    many = moment_bound(problem, budget, moments=[*first, 60, 70]).value
    assert few <= many * (1 + 1e-6)


@pytest.mark.parametrize("name", ["mobilenet", "gpt"])
def test_proves_the_optimum_of_training_steps(name: str) -> None:
    problem = {"mobilenet": dags.mobilenet(8), "gpt": dags.gpt(4)}[name]
    budget = int(0.7 * problem.keep_all_peak)
    bound, plan = moment_bound(problem, budget), solve(problem, budget, method="next-use", time_limit=2)
    assert peak_of(problem, bound.schedule.R) <= budget
    assert bound.value == pytest.approx(cost_of(problem, bound.schedule.R), rel=1e-6)
    assert problem.keep_all_cost < bound.value <= plan.cost * (1 + 1e-6)


def test_tells_what_each_better_answer_would_run_and_the_lifted_one_costs_no_more_than_the_model() -> None:
    problem, told = dags.gpt(4), list[float]()
    budget = int(0.5 * problem.keep_all_peak)
    bound = moment_bound(problem, budget, most=2, on_runs=lambda R: told.append(cost_of(problem, R)))
    assert told[-1] == min(told) == pytest.approx(cost_of(problem, lifted_runs(problem, bound)))
    problem = dags.resnet()
    bound = moment_bound(problem, int(0.7 * problem.keep_all_peak), most=2)
    assert cost_of(problem, lifted_runs(problem, bound)) <= bound.value * (1 + 1e-6)


def test_an_op_writes_over_one_value_only_and_over_none_that_is_carried_past_the_moment() -> None:
    problem = Problem.from_dag([[], [], [0, 1]], [1] * 3, [4] * 3, over={2: [0, 1]})
    assert moment_bound(problem, 8, moments=[2]).value == 3
    impossible = moment_bound(problem, 7, moments=[2])
    assert (impossible.infeasible, impossible.value) == (True, math.inf)
    problem = Problem.from_dag([[], [0], [0, 1]], [1] * 3, [4, 4, 1], workspace=[0, 4, 0], over={1: [0]})
    assert moment_bound(problem, 12, moments=[1]).value == 3
    assert moment_bound(problem, 11, moments=[1]).value == optimum(outcomes(problem), 11) == 4


def test_holds_its_time_limit_and_proves_something_within_it() -> None:
    problem = dags.resnet((3, 4, 6, 3))
    with takes_less_than(2.0):
        bound = moment_bound(problem, int(0.6 * problem.keep_all_peak), seconds=1.0)
    assert bound.value >= problem.keep_all_cost


def test_what_is_kept_is_integer_so_that_the_solver_may_round_the_memory_rows() -> None:
    problem = dags.unit_chain(8)
    relaxed = build(problem, 4, default_moments(problem))
    assert relaxed.model.integer[relaxed.X[relaxed.X >= 0]].all()


CASES = [*PLAIN_AND_WAYS, random_ruled_problem]


def one_input_each(problem: Problem, seed: int) -> Problem:
    """Most ops read one value only, so that many values have one reader."""
    rng, graph = np.random.default_rng(seed), problem.graph
    ops = tuple(replace(op, inputs=op.inputs[-1:]) if rng.random() < 0.7 else op for op in graph.ops)
    ways = tuple(way for way in problem.profile.ways if way.over in ops[way.op].inputs)
    return replace(problem, graph=replace(graph, ops=ops), profile=replace(problem.profile, ways=ways))


@pytest.mark.parametrize("first", every(4, range(0, 60, 15)))
def test_keeping_what_is_made_of_a_value_instead_costs_no_more(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = 0
    for seed, drawn in by_turns(CASES, range(first, first + 15), 9):
        problem, rng, ops = one_input_each(drawn, seed), np.random.default_rng(seed), len(drawn.graph.ops)
        at = sorted(rng.choice(ops, int(rng.integers(1, ops)), replace=False).tolist())
        for budget in np.linspace(problem.unavoidable_bytes.max(), problem.keep_all_peak, 3).astype(int).tolist():
            known = build(problem, budget, at).model
            with monkeypatch.context() as all_kept:
                never = lambda problem, held, at: np.zeros((len(at), len(held)), dtype=bool)  # noqa: E731
                all_kept.setattr("checkmate.solvers.linear.moment_model._better_as_made_of", never)
                plain = build(problem, budget, at).model
            smaller += known.columns < plain.columns
            assert highs.run(known).objective == pytest.approx(highs.run(plain).objective)
    assert smaller


# op 0 makes what ops 1, 3 and 5 read; op 4 is large
STEP = Problem.from_dag([[], [0], [1], [0, 2], [3], [0, 4], [5]], seconds=[5] + [1] * 6, sizes=[4, 4, 4, 4, 9, 4, 4])


def test_a_moment_comes_between_two_runs_where_most_is_at_hand() -> None:
    R = runs(STEP, (5, 0))  # bytes at hand with the runs below: 4, 8, 8, 12, 13, 17, 8
    assert where_runs_repeat(STEP, R, [], most=3) == [4]
    assert where_runs_repeat(STEP, R, [4], most=3) == []
    cheap = replace(STEP, profile=replace(STEP.profile, seconds=np.array([0.01, 1, 1, 1, 1, 1, 1])))
    assert where_runs_repeat(cheap, R, [], most=3) == []  # it pays next to nothing
    R[3, 0] = True
    assert where_runs_repeat(STEP, R, [], most=1) == [4]
    assert where_runs_repeat(STEP, R, [4], most=3) == [1]  # stages 1 and 2 have 8 bytes both
    assert where_runs_repeat(STEP, R, [], most=3) == [4, 1]


def test_all_runs_of_a_plan_are_paid_with_enough_moments() -> None:
    problem, incumbent = dags.unit_chain(8), begun(dags.unit_chain(8), 3, 1.0)
    next_use(incumbent.task, incumbent)
    few, enough = (where_runs_repeat(problem, incumbent.R, [], most=most) for most in (1, 17))
    assert enough[:1] == few
    paid = [  # seconds of ops that count once between two moments
        float(np.logical_or.reduceat(incumbent.R, [0, *(t + 1 for t in moments)], axis=0).sum(axis=0) @ problem.seconds)
        for moments in (few, sorted(enough))
    ]
    assert paid[0] < paid[1] == incumbent.cost
    assert where_runs_repeat(problem, runs(problem), [], most=17) == []


def test_one_stage_in_each_part_of_a_gap_that_breaks_the_budget_the_worst_first() -> None:
    R = runs(STEP)  # bytes: 4, 8, 12, 12, 17, 17, 8
    # stages 4 and 5 break it alike, and in 5 more bytes are unavoidable
    assert where_it_breaks(STEP, 10, R, [], most=1) == [5]
    assert where_it_breaks(STEP, 10, R, [], most=3) == [4, 5, 2]  # parts: 0 to 2, 3 and 4, 5 and 6
    assert where_it_breaks(STEP, 10, R, [3], most=2) == [5, 2]
    assert where_it_breaks(STEP, 10, R, [3], most=1) == [5]
    assert where_it_breaks(STEP, 10, R, [3, 4, 5], most=3) == [2]
    assert where_it_breaks(STEP, 17, R, [], most=3) == []


def test_several_moments_at_a_time_far_from_the_best_plan_and_one_close_to_it() -> None:
    problem, budget = dags.unit_chain(16), 5
    incumbent = begun(problem, budget, 10.0, gap=EXACT)
    bound = bound_of(incumbent.task, incumbent, moments=default_moments(problem), most=1)
    (only,) = bound.moments
    next_use(incumbent.task, incumbent)
    several = next_moments(problem, budget, bound, incumbent, most=12)
    assert len(several) > 2
    assert only in several
    assert len(next_moments(problem, budget, bound, incumbent, most=2)) == 2
    assert next_moments(problem, budget, bound, incumbent, most=1) == [only]
    incumbent.cost = 1.005 * bound.value
    assert len(next_moments(problem, budget, bound, incumbent, most=12)) == 2


def test_what_a_plan_repeats_is_looked_at_beside_where_the_answer_breaks_the_budget() -> None:
    """A model that was out of time tells of no place that breaks the budget."""
    problem = dags.unit_chain(8)
    incumbent = begun(problem, 3, 10.0, gap=EXACT)
    bound = bound_of(incumbent.task, incumbent, most=2)
    alone = next_moments(problem, 3, bound, incumbent, most=17)
    next_use(incumbent.task, incumbent)
    assert set(alone) < set(next_moments(problem, 3, bound, incumbent, most=17))
    bound = Bound(17.0, (8,), np.zeros((1, 17), dtype=bool), np.zeros((2, 17), dtype=bool), cut=True)
    assert next_moments(problem, 4, bound, begun(problem, 4), most=12) == [8]
