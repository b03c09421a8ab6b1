"""The moment bound: below every schedule, and often on the best."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.schedules import cost_of, peak_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.moments import EXACT, Bound, build, default_moments, lift
from checkmate.solvers.linear.moments import moment_bound as bound_of
from tests.support.oracle import (
    interesting_budgets,
    optimum,
    outcomes,
    random_problem,
    random_problem_with_ways,
    random_ruled_problem,
)
from tests.support.sampling import every, in_turn

next_use = METHODS["next-use"].solve


def moment_bound(
    problem: Problem, budget: int, *, start: Schedule | None = None, seconds: float = 10.0, **options: Any
) -> Bound:
    task = Task(problem, budget, Clock(seconds), gap=EXACT)
    incumbent = Incumbent(task)
    assert start is None or incumbent.offer(start.R, "start")
    bound = bound_of(task, incumbent, **options)
    assert incumbent.bound >= bound.value * (1 - EXACT)  # it was told
    return bound


@in_turn(block=every(5, range(10)))
def test_never_above_the_optimum(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        problem = (random_problem, random_problem_with_ways)[seed % 2](seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            best = optimum(known, budget)
            bound = moment_bound(problem, budget)
            assert bound.value <= best + 1e-6
            assert not bound.infeasible or best == math.inf
            if bound.schedule is not None:
                assert bound.schedule.violations(problem, budget) == []
                assert bound.schedule.cost(problem) == pytest.approx(best)


@pytest.mark.parametrize("block", every(4, range(4)))
def test_any_moments_give_a_bound(block: int) -> None:
    for seed in range(300 + 10 * block, 310 + 10 * block):
        problem = (random_problem, random_problem_with_ways)[seed % 2](seed, most_ops=5)
        known = outcomes(problem)
        ops = range(len(problem.graph.ops))
        for budget in interesting_budgets(known)[:-1]:
            for moments in itertools.chain(itertools.combinations(ops, 1), itertools.combinations(ops, 3)):
                bound = moment_bound(problem, budget, moments=moments, most=3)
                assert not bound.infeasible
                assert bound.value <= optimum(known, budget) + 1e-6


@pytest.mark.parametrize(("budget", "cost"), [(3, 45), (4, 26), (5, 22), (6, 21), (8, 19)])
def test_below_the_golden_optima_of_the_chain(budget: int, cost: int) -> None:
    bound = moment_bound(dags.unit_chain(8), budget)
    assert 17 < bound.value <= cost + 1e-6
    assert moment_bound(dags.unit_chain(8), budget, moments=[8]).value <= bound.value + 1e-6


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
    bound = moment_bound(problem, budget)
    assert bound.schedule is not None
    assert peak_of(problem, bound.schedule.R) <= budget
    assert bound.value == pytest.approx(bound.schedule.cost(problem), rel=1e-6)
    assert problem.keep_all_cost < bound.value <= next_use(problem, budget, time_limit=2).cost * (1 + 1e-6)


def test_the_lifted_answer_costs_no_more_than_the_model() -> None:
    problem = dags.resnet()
    bound = moment_bound(problem, int(0.7 * problem.keep_all_peak), most=2)
    assert lift(problem, bound).cost(problem) <= bound.value * (1 + 1e-6)


def test_a_budget_that_keeps_everything_proves_nothing_more() -> None:
    problem = dags.vgg(6)
    bound = moment_bound(problem, problem.keep_all_peak)
    assert bound.value == pytest.approx(problem.keep_all_cost)
    assert bound.schedule is not None


def test_says_that_nothing_fits() -> None:
    problem = dags.unit_chain(8)
    bound = moment_bound(problem, 2)
    assert bound.infeasible
    assert bound.value == math.inf


def test_an_op_writes_over_one_value_only() -> None:
    problem = Problem.from_dag([[], [], [0, 1]], [1] * 3, [4] * 3, over={2: [0, 1]})
    assert moment_bound(problem, 8, moments=[2]).value == 3
    assert moment_bound(problem, 7, moments=[2]).infeasible


def test_what_is_carried_past_a_moment_is_not_written_over_at_it() -> None:
    problem = Problem.from_dag([[], [0], [0, 1]], [1] * 3, [4, 4, 1], workspace=[0, 4, 0], over={1: [0]})
    assert moment_bound(problem, 12, moments=[1]).value == 3
    assert moment_bound(problem, 11, moments=[1]).value == optimum(outcomes(problem), 11) == 4


def test_holds_its_time_limit_and_proves_something_within_it() -> None:
    problem = dags.resnet((3, 4, 6, 3))
    began = time.perf_counter()
    bound = moment_bound(problem, int(0.6 * problem.keep_all_peak), seconds=1.5)
    assert time.perf_counter() - began < 2.5
    assert bound.value >= problem.keep_all_cost


def test_a_known_schedule_is_a_start() -> None:
    problem = dags.gpt(4)
    budget = int(0.7 * problem.keep_all_peak)
    start = next_use(problem, budget, time_limit=1)
    bound = moment_bound(problem, budget, start=start.schedule)
    assert isinstance(bound, Bound)
    assert bound.value <= start.cost * (1 + 1e-6)


def test_tells_what_each_better_answer_would_run() -> None:
    problem = dags.gpt(4)
    told: list[float] = []
    bound = moment_bound(
        problem, int(0.5 * problem.keep_all_peak), most=2, on_runs=lambda R: told.append(cost_of(problem, R))
    )
    assert told
    assert told[-1] == min(told) == pytest.approx(lift(problem, bound).cost(problem))


def test_what_is_kept_is_integer_so_that_the_solver_may_round_the_memory_rows() -> None:
    problem = dags.unit_chain(8)
    relaxed = build(problem, 4, default_moments(problem))
    assert relaxed.model.integer[relaxed.X[relaxed.X >= 0]].all()


CASES = (random_problem, random_problem_with_ways, random_ruled_problem)


def one_input_each(problem: Problem, seed: int) -> Problem:
    """Most ops read one value only, so that many values have one reader."""
    rng, graph = np.random.default_rng(seed), problem.graph
    ops = tuple(replace(op, inputs=op.inputs[-1:]) if rng.random() < 0.7 else op for op in graph.ops)
    ways = tuple(way for way in problem.profile.ways if way.over in ops[way.op].inputs)
    return replace(problem, graph=replace(graph, ops=ops), profile=replace(problem.profile, ways=ways))


@pytest.mark.parametrize("block", every(4, range(4)))
def test_keeping_what_is_made_of_a_value_in_its_place_costs_no_more(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(problem: Problem, held: np.ndarray, at: list[int]) -> np.ndarray:
        return np.zeros((len(at), len(held)), dtype=bool)

    smaller = 0
    for seed in range(15 * block, 15 * block + 15):
        problem = one_input_each(CASES[seed % 3](seed, most_ops=9), seed)
        rng, ops = np.random.default_rng(seed), len(problem.graph.ops)
        at = sorted(rng.choice(ops, int(rng.integers(1, ops)), replace=False).tolist())
        for budget in np.linspace(problem.unavoidable_bytes.max(), problem.keep_all_peak, 3).astype(int).tolist():
            known = build(problem, budget, at).model.columns
            found = highs.run(build(problem, budget, at).model).objective
            with monkeypatch.context() as all_kept:
                all_kept.setattr("checkmate.solvers.linear.moments._better_as_made_of", never)
                smaller += known < build(problem, budget, at).model.columns
                assert found == pytest.approx(highs.run(build(problem, budget, at).model).objective)
    assert smaller


@in_turn(block=every(5, range(10)))
def test_rows_about_spans_leave_each_schedule_and_the_least_cost(block: int) -> None:
    for seed in range(12 * block, 12 * block + 12):
        problem = CASES[seed % 3](seed, most_ops=8)
        T = len(problem.graph.ops)
        moments = sorted({*default_moments(problem), *range(1, T - 1, 2)})
        for budget in (int(share * problem.keep_all_peak) for share in (0.6, 0.8)):
            plain, spanned = (build(problem, budget, moments, spanned=also).model for also in (False, True))
            best, same = highs.run(plain), highs.run(spanned)
            assert best.outcome is same.outcome
            if best.x is not None:
                assert same.objective == pytest.approx(best.objective)
            parts = [highs.run(model, relax=True) for model in (plain, spanned)]
            assert parts[0].bound <= parts[1].bound + 1e-6 or parts[1].outcome is highs.SolveStatus.INFEASIBLE


def test_with_rows_about_spans_more_moments_prove_no_less() -> None:
    problem = dags.gpt(4)
    begin, end = problem.graph.forward_length - 1, len(problem.graph.ops) - 1
    budget, moments = int(0.5 * problem.keep_all_peak), list(range(begin, end, (end - begin) // 7))

    def relaxed(moments: list[int], *, spanned: bool) -> float:
        return highs.run(build(problem, budget, moments, spanned=spanned).model, relax=True).bound

    fewer = relaxed(moments[::2], spanned=False)
    assert relaxed(moments, spanned=False) < fewer <= relaxed(moments, spanned=True) + 1e-6
