"""Dynamic tensor rematerialization, staged."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core import simulator
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.dtr import HEURISTICS, Runtime
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.task import Clock, OutOfTime
from tests.solvers.search.test_next_use import masked
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem, random_problem_with_ways
from tests.support.sampling import every, in_turn

dtr = METHODS["dtr"].solve
milp = METHODS["milp"].solve


def check(solution: Solution) -> None:
    assert solution.plan is not None
    assert simulator.verify(solution.plan, solution.problem, solution.budget) == []
    assert solution.peak == simulator.simulate(solution.plan, solution.problem).peak <= solution.budget
    assert solution.cost == pytest.approx(simulator.cost(solution.plan, solution.problem))


@pytest.mark.parametrize("heuristic", ["h_full", "h_eq"])
@pytest.mark.parametrize("layers", [64, 256])
def test_with_memory_of_the_root_of_the_length_a_chain_costs_a_constant_factor(heuristic: str, layers: int) -> None:
    """What the paper proves for such scores: O(N) ops in Ω(√N) memory."""
    solution = dtr(dags.unit_chain(layers), 2 * math.isqrt(layers), heuristic=heuristic)
    check(solution)
    assert solution.cost <= 1.5 * solution.problem.keep_all_cost


def test_without_the_neighbourhood_the_factor_grows() -> None:
    factors = [dtr(dags.unit_chain(n), 2 * math.isqrt(n), heuristic="local").overhead for n in (16, 64, 256)]
    assert factors[0] < 0.5 < 0.8 < factors[1] < 1.5 < factors[2]


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("layers", [3, 5, 7])
def test_on_short_chains_it_is_never_below_the_optimum_and_near_it(heuristic: str, layers: int) -> None:
    chain = dags.unit_chain(layers)
    for budget in range(4, chain.keep_all_peak + 1):
        solution = dtr(chain, budget, heuristic=heuristic)
        check(solution)
        assert milp(chain, budget, time_limit=20).cost <= solution.cost + 1e-9 <= 1.7 * chain.keep_all_cost


@in_turn(heuristic=HEURISTICS, block=every(3, range(3)))
def test_never_below_the_optimum_of_small_problems(heuristic: str, block: int) -> None:
    for seed in range(15 * block, 15 * block + 15):
        problem = random_problem(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            for options in ({}, {"ignore_small": True}, {"sample": True, "seed": seed}):
                solution = dtr(problem, budget, heuristic=heuristic, **options)
                assert solution.cost >= optimum(known, budget) - 1e-9
                if solution.plan is not None:
                    check(solution)


def test_it_writes_over_what_goes_right_after_the_run() -> None:
    chain = Problem.from_dag([[], [0], [1]], [1] * 3, [8] * 3, over={1: [0], 2: [1]})
    assert dtr(chain, 8).cost == 3.0
    read_later = Problem.from_dag([[], [0], [0, 1]], [1] * 3, [8, 8, 8], over={1: [0], 2: [1]})
    assert dtr(read_later, 16).cost == 3.0
    assert dtr(read_later, 15).status is Status.NOT_FOUND


@pytest.mark.parametrize("block", every(3, range(3)))
def test_with_ways_it_is_never_below_the_optimum_of_small_problems(block: int) -> None:
    for seed in range(15 * block, 15 * block + 15):
        problem = random_problem_with_ways(seed, most_ops=4)
        known = outcomes(problem)
        for budget in interesting_budgets(known):
            solution = dtr(problem, budget)
            assert solution.cost >= optimum(known, budget) - 1e-9
            if solution.plan is not None:
                check(solution)


@in_turn(seed=range(30))
def test_without_pressure_nothing_runs_again(seed: int) -> None:
    problem = random_problem(seed, most_ops=16)
    for heuristic in HEURISTICS:
        solution = dtr(problem, problem.keep_all_peak, heuristic=heuristic)
        assert solution.status is Status.OPTIMAL
        assert solution.cost == pytest.approx(problem.keep_all_cost)


@pytest.mark.parametrize("problem", [dags.unet(), dags.gpt(3), dags.resnet()], ids=["unet", "gpt", "resnet"])
def test_all_scores_are_tried_and_the_cheapest_is_kept_and_named(problem: Problem) -> None:
    budget = int(0.8 * problem.keep_all_peak)
    best = dtr(problem, budget, time_limit=60)
    check(best)
    each = {name: dtr(problem, budget, heuristic=name, time_limit=60).cost for name in HEURISTICS}
    assert best.details["costs"] == pytest.approx(each)
    assert best.cost == pytest.approx(min(each.values()))
    assert each[best.details["heuristic"]] == pytest.approx(min(each.values()))
    assert best.overhead < 0.05


def test_options_that_look_at_fewer_values_still_find_plans() -> None:
    problem = dags.gpt(2)
    budget = int(0.7 * problem.keep_all_peak)
    plain, sampled = (dtr(problem, budget, heuristic="h_eq", sample=sample) for sample in (False, True))
    check(sampled)
    assert sampled.cost == dtr(problem, budget, heuristic="h_eq", sample=True).cost
    assert sampled.cost != plain.cost
    check(dtr(problem, budget, heuristic="h_eq", ignore_small=True))


def test_small_values_go_where_there_is_nothing_else() -> None:
    """Values of one byte beside one of thousands; the room that is lacking is theirs."""
    problem = Problem.from_dag([[], [], [], [2], [0, 1, 3]], seconds=[1] * 5, sizes=[1, 1, 1000, 1, 1], outputs=[4])
    solution = dtr(problem, 1002, heuristic="size", ignore_small=True)
    check(solution)
    assert solution.cost == 6.0


def test_a_mask_is_held_to_bring_back_the_noise_made_of_it() -> None:
    for heuristic in HEURISTICS:
        solution = dtr(masked(noise=4, mask=1), budget=8, heuristic=heuristic)
        check(solution)
        assert solution.schedule is not None
        assert solution.schedule.recomputed.tolist() == [0, 1, 0, 0, 0]


def test_what_a_pinned_op_made_goes_for_good_where_less_stays_for_it() -> None:
    problem = masked(noise=4, mask=8)
    assert dtr(problem, budget=12).cost == 5.0
    assert dtr(problem, budget=11).status is Status.NOT_FOUND


def test_a_second_copy_of_a_result_is_counted() -> None:
    """Op 0 makes a result and a value that has to come back: for a moment there are two of the result."""
    values = [Value("result", 4, 0), Value("x", 3, 0), Value("big", 6, 1), Value("end", 1, 2)]
    ops = [Op("two", "f", (), (0, 1)), Op("press", "f", (), (2,)), Op("mid", "f", (2,), (3,))]
    values.append(Value("out", 1, 3))
    ops.append(Op("out", "f", (1, 3), (4,)))
    problem = Problem(Graph(tuple(ops), tuple(values), (0, 4)), Profile(np.ones(4), np.zeros(4)))
    solution = dtr(problem, budget=12, heuristic="local")
    check(solution)
    assert solution.cost == 5.0
    assert solution.peak == 12  # result, its copy, x, end
    assert dtr(problem, budget=11, heuristic="local").status is Status.NOT_FOUND


def test_a_chain_longer_than_pythons_stack_comes_back() -> None:
    n = 1500
    deps = [[k - 1] if k else [] for k in range(n)] + [[], [n - 1, n]]
    deps[n - 1] = [n - 2]
    problem = Problem.from_dag(deps, seconds=[1] * (n + 2), sizes=[1] * n + [2, 1], outputs=[n + 1])
    runtime = Runtime(Tables.of(problem), 4, HEURISTICS["LRU"], clock=Clock())
    stages = runtime.run()
    assert isinstance(stages, list)


def test_no_such_heuristic() -> None:
    with pytest.raises(ValueError, match=r"no heuristic 'lru'.*LRU"):
        dtr(dags.unit_chain(3), 5, heuristic="lru")


def test_where_nothing_is_left_to_evict_it_says_so() -> None:
    problem = dags.gpt(2)
    solution = dtr(problem, int(problem.unavoidable_bytes.max()), heuristic="size")
    assert solution.status is Status.NOT_FOUND
    assert problem.graph.ops[solution.stuck].name in solution.message


def test_the_time_limit_is_named() -> None:
    solution = dtr(dags.gpt(4), int(0.6 * dags.gpt(4).keep_all_peak), time_limit=0.0)
    assert solution.status is Status.NOT_FOUND
    assert "time limit" in solution.message


def test_a_run_that_goes_round_in_circles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkmate.solvers.baselines.dtr.MOST_RUNS", 2)
    runtime = Runtime(
        Tables.of(dags.unit_chain(8)), 3, HEURISTICS["LRU"], clock=Clock()
    )  # 45 runs of 17 ops, at the least
    with pytest.raises(OutOfTime):
        runtime.run()


@pytest.mark.long
def test_a_thousand_ops_take_seconds() -> None:
    problem = dags.gpt(24)
    began = time.perf_counter()
    solution = dtr(problem, problem.keep_all_peak // 2, time_limit=10.0)
    assert time.perf_counter() - began < 12
    check(solution)
    assert solution.overhead < 0.2
