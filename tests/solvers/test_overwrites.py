"""Ops that overwrite what others read: every solver against all schedules there are, and gradients made twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Status
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Incumbent
from checkmate.solvers.common.schedules import obeys_limits, on_demand, peak_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.linear.moments import moment_bound
from checkmate.solvers.search.backward_beam import Beam, prices
from checkmate.solvers.search.greedy import GRID, DeadEnd, run_pass
from checkmate.solvers.search.min_budget import least_runs, min_budget
from checkmate.solvers.search.value_sets import ValueSets
from checkmate.solvers.solve import solve
from tests.support.oracle import (
    all_schedules,
    interesting_budgets,
    optimum,
    outcomes,
    random_problem_with_overwrites,
)
from tests.support.sampling import in_turn, long
from tests.support.searches import found_from

SEEDS = [*range(2), *map(long, range(2, 4)), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]


def wrong(problem: Problem, R: np.ndarray, budget: int | None = None) -> list[str]:
    return simulator.check_plan(simulator.lower(problem, Schedule.from_runs(problem.graph, R)), problem, budget)


@in_turn(seed=SEEDS)
def test_every_method_beside_all_schedules_that_are_allowed(seed: int) -> None:
    check_methods(random_problem_with_overwrites(seed))


def check_methods(problem: Problem) -> None:
    known = outcomes(problem)  # of those that the verifier lets pass
    smallest, ends = min(peak for _, peak in known), min_budget(problem)
    assert (ends.peak, ends.bound) == (smallest, smallest)
    assert peak_of(problem, least_runs(problem)[1]) == smallest
    for budget in interesting_budgets(known):
        best = optimum(known, budget)
        for method in (name for name in METHODS if budget > 0 and not METHODS[name].needs_host):
            found = solve(problem, budget, method=method, time_limit=5)
            assert found.bound <= best * (1 + 1e-6) or found.status is Status.INFEASIBLE
            assert found.cost >= best * (1 - 1e-9)
            assert (found.status is not Status.INFEASIBLE) or best == float("inf")
            assert found.plan is None or not wrong(problem, found.schedule.R, budget)
            assert "failed" not in found.details
            assert method not in ("auto", "milp") or found.cost == pytest.approx(best, rel=2e-4)
        paper = solve(problem, budget, method="milp", formulation="paper") if budget > 0 else None
        assert paper is None or paper.cost == pytest.approx(best, rel=2e-4)


@in_turn(seed=SEEDS)
def test_every_part_of_auto_obeys(seed: int) -> None:
    check_parts(random_problem_with_overwrites(seed))


def check_parts(problem: Problem) -> None:
    every = [schedule.R for schedule in all_schedules(problem)]
    good = [R for R in every if not wrong(problem, R)]
    at = {budget: [R for R in good if peak_of(problem, R) <= budget] for budget in {peak_of(problem, R) for R in good}}
    assert not wrong(problem, on_demand(problem, dict.fromkeys(range(len(problem.graph.ops)), ())))
    for budget, fitting in sorted(at.items())[:3]:
        task, best = Task(problem, budget, Clock(5.0)), min(float(R.sum(axis=0) @ problem.seconds) for R in fitting)
        dearest = max(fitting, key=lambda R: float(R.sum()))
        sets = ValueSets(problem)
        price = prices(sets, budget, np.zeros(sets.T))
        for found in (
            *found_from(task, dearest, every),
            Beam(sets, budget, 64, price, Clock(2.0)).search(dearest),
        ):
            assert found is None or not wrong(problem, found, budget)
        again, found = Beam(sets, budget, 4096, price, Clock(5.0)).bound()
        assert found is not None
        assert problem.keep_all_cost + again == pytest.approx(best)
        for weights in GRID[:6]:
            stages = run_pass(Tables.of(problem), budget, weights)
            if not isinstance(stages, DeadEnd):
                assert set(np.flatnonzero(_forbidden(problem, stages))) == set()
        assert moment_bound(task, Incumbent(task), most=5).value <= best * (1 + 1e-6)


def _forbidden(problem: Problem, stages: list[list[int]]) -> list[bool]:
    until = problem.limits.last_stage
    return [t > until.get(k, t) for t, ops in enumerate(stages) for k in ops]


@in_turn(seed=range(4))
def test_what_searches_ask_is_what_the_verifier_finds(seed: int) -> None:
    problem = random_problem_with_overwrites(seed)
    pinned = [k for k, op in enumerate(problem.graph.ops) if op.pinned]
    for schedule in all_schedules(problem):
        if (schedule.R[:, pinned].sum(axis=0) == 1).all():
            assert obeys_limits(problem, schedule.R) == (not wrong(problem, schedule.R))


def whole_step(layers: int, *, clipped: bool) -> Problem:
    """Layers forward and backward, and an update of each one's parameter as soon as it can be.

    A gradient of a parameter has 20 bytes, all else 4 or less. Where gradients are clipped, each one's norm is taken
    (once) as soon as it is there, then the factor (once), and updates read the gradients again.
    """
    place: dict[str, int] = {}
    deps: list[list[int]] = []
    seconds: list[float] = []
    sizes: list[int] = []

    def op(name: str, reads: list[str], takes: float, makes: int) -> None:
        place[name] = len(deps)
        deps.append([place[of] for of in reads])
        seconds.append(takes)
        sizes.append(makes)

    for i in range(layers):
        op(f"layer {i}", [f"layer {i - 1}"][:i], 2, 4)
    op("loss", [f"layer {layers - 1}"], 1, 0)
    op(f"into {layers - 1}", ["loss", f"layer {layers - 1}"], 1, 4)
    updates = [f"update {i}" for i in reversed(range(layers))]
    for i in reversed(range(layers)):
        reads = [f"into {i}", *[f"layer {i - 1}"][:i]]
        op(f"gradient {i}", reads, 2, 20)
        if clipped:
            op(f"norm {i}", [f"gradient {i}"], 0.5, 1)
        if i:
            op(f"into {i - 1}", reads, 2, 4)
        if not clipped:
            op(updates[-1 - i], [f"gradient {i}"], 1, 0)
    if clipped:
        op("factor", [f"norm {i}" for i in range(layers)], 0.5, 1)
        for i in reversed(range(layers)):
            op(f"update {i}", [f"gradient {i}", "factor"], 1, 0)
    reading = [[f"layer {i}", *[f"into {i - 1}"][:i]] for i in range(layers)]
    readers = {place[f"update {i}"]: [place[name] for name in reading[i]] for i in range(layers)}
    problem = Problem.from_dag(deps, seconds, sizes, outputs=[place["loss"]], forward=layers + 1, overwrites=readers)
    names = {k: name for name, k in place.items()}
    ops = [replace(op, name=names[k]) for k, op in enumerate(problem.graph.ops)]
    once = [replace(op, pinned="tells the norm") if op.name.split()[0] in ("norm", "factor") else op for op in ops]
    return replace(problem, graph=replace(problem.graph, ops=tuple(once)))


@pytest.mark.parametrize("clipped", [False, True])
def test_auto_is_as_good_as_the_exact_model_on_whole_steps(clipped: bool) -> None:
    problem = whole_step(3, clipped=clipped)
    ends = min_budget(problem)
    assert ends.proven
    for budget in sorted({ends.peak, ends.peak + 1, (ends.peak + problem.keep_all_peak) // 2}):
        exact, auto = (solve(problem, budget, method=method, time_limit=20) for method in ("milp", "auto"))
        assert exact.status is Status.OPTIMAL
        assert auto.cost == pytest.approx(exact.cost, rel=2e-4)
        assert exact.bound <= auto.cost * (1 + 1e-6)
    assert solve(problem, ends.peak - 1, method="milp").status is Status.INFEASIBLE


def test_gradients_that_wait_for_their_norm_are_made_a_second_time() -> None:
    """No plan that makes gradients once fits what all of them take; one that makes them twice fits far less."""
    layers = 8
    problem = whole_step(layers, clipped=True)
    names = [op.name for op in problem.graph.ops]
    gradients = 20 * layers
    assert problem.keep_all_peak > gradients > 4 * min_budget(problem, time_limit=5).peak
    plan = solve(problem, gradients // 3, time_limit=2)
    assert plan.schedule is not None
    again = [name for name, times in zip(names, plan.schedule.recomputed, strict=True) if times]
    assert sum(name.startswith("gradient") for name in again) >= layers // 2
    assert plan.cost < 2 * problem.keep_all_cost
    assert not wrong(problem, plan.schedule.R, gradients // 3)
