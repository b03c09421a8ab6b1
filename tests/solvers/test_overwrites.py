"""Ops that overwrite what others read: every solver against all schedules there are, and gradients made twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
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
from checkmate.solvers.common.schedules import cost_of, obeys_limits, on_demand, peak_of
from checkmate.solvers.common.task import Clock, Task
from checkmate.solvers.linear.moments import moment_bound
from checkmate.solvers.search.adapt import adapt
from checkmate.solvers.search.backward_beam import Beam, prices
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.greedy import GRID, DeadEnd, TiltedPasses, run_pass
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.min_budget import least_runs, min_budget
from checkmate.solvers.search.neighbourhoods import Neighbourhoods
from checkmate.solvers.search.value_sets import ValueSets
from checkmate.solvers.solve import solve
from tests.support.oracle import all_schedules, interesting_budgets, optimum, outcomes, random_problem_with_overwrites
from tests.support.sampling import in_turn, long, slow

SEEDS = [*range(2), *map(long, range(2, 4)), *map(slow, range(4, 12))]


def wrong(problem: Problem, R: np.ndarray, budget: int | None = None) -> list[str]:
    return simulator.check_plan(simulator.lower(problem, Schedule.from_runs(problem.graph, R)), problem, budget)


@in_turn(seed=SEEDS)
def test_every_method_beside_all_schedules_that_are_allowed(seed: int) -> None:
    methods = [name for name in METHODS if not METHODS[name].needs_host]
    check_methods(random_problem_with_overwrites(seed), methods, exact=("auto", "milp"))


def check_methods(problem: Problem, methods: Iterable[str], exact: Collection[str]) -> None:
    """Beside all schedules that the verifier lets pass; what is exact finds the best of them, in both forms."""
    known = outcomes(problem)
    smallest, ends = min(peak for _, peak in known), min_budget(problem)
    assert ends.bound <= smallest <= ends.peak
    assert problem.limits.max_runs or ends.proven
    assert peak_of(problem, least_runs(problem)[1]) == ends.peak
    assert not wrong(problem, least_runs(problem)[1])
    asked = [*((method, {}) for method in methods), ("milp", {"formulation": "paper"})]
    for budget in (budget for budget in interesting_budgets(known) if budget > 0):
        best = optimum(known, budget)
        for method, options in asked:
            found = solve(problem, budget, method=method, time_limit=5, gap=0.0, **options)
            assert found.bound <= best * (1 + 1e-6) or found.status is Status.INFEASIBLE
            assert found.cost >= best * (1 - 1e-9)
            assert (found.status is not Status.INFEASIBLE) or best == float("inf")
            assert found.plan is None or not wrong(problem, found.schedule.R, budget)
            assert "failed" not in found.details
            assert method not in exact or found.cost == pytest.approx(best)


@in_turn(seed=SEEDS)
def test_every_part_of_auto_obeys(seed: int) -> None:
    problem = random_problem_with_overwrites(seed)
    assert not wrong(problem, on_demand(problem, dict.fromkeys(range(len(problem.graph.ops)), ())))
    sets, until = ValueSets(problem), problem.limits.last_stage
    for task, dearest, best in check_parts(problem):
        price = prices(sets, task.budget, np.zeros(sets.T))
        found = Beam(sets, task.budget, 64, price, Clock(2.0)).search(dearest)
        assert found is None or not wrong(problem, found, task.budget)
        again, _ = Beam(sets, task.budget, 4096, price, Clock(5.0)).bound()
        assert problem.keep_all_cost + again == pytest.approx(best)
        for weights in GRID[:6]:
            stages = run_pass(Tables.of(problem), task.budget, weights)
            if not isinstance(stages, DeadEnd):
                assert all(t <= until.get(k, t) for t, ops in enumerate(stages) for k in ops)


def check_parts(problem: Problem) -> Iterator[tuple[Task, np.ndarray, float]]:
    """For the smallest budgets that schedules fit: a task, that with the most runs, and the least seconds."""
    every = [schedule.R for schedule in all_schedules(problem)]
    good = [R for R in every if not wrong(problem, R)]
    for budget in sorted({peak_of(problem, R) for R in good})[:3]:
        fitting = [R for R in good if peak_of(problem, R) <= budget]
        task, best = Task(problem, budget, Clock(5.0)), min(cost_of(problem, R) for R in fitting)
        dearest = max(fitting, key=lambda R: float(R.sum()))
        for found in _found_from(task, dearest, every):
            assert found is None or not wrong(problem, found, budget)
        assert moment_bound(task, Incumbent(task), most=5).value <= best * (1 + 1e-6)
        yield task, dearest, best


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
    made: dict[str, tuple[list[int], float, int]] = {}  # what each op reads, its seconds and bytes
    place: dict[str, int] = {}

    def op(name: str, reads: list[str], takes: float, makes: int) -> None:
        place[name] = len(made)
        made[name] = ([place[of] for of in reads], takes, makes)

    for i in range(layers):
        op(f"layer {i}", [f"layer {i - 1}"][:i], 2, 4)
    op("loss", [f"layer {layers - 1}"], 1, 0)
    op(f"into {layers - 1}", ["loss", f"layer {layers - 1}"], 1, 4)
    for i in reversed(range(layers)):
        reads = [f"into {i}", *[f"layer {i - 1}"][:i]]
        op(f"gradient {i}", reads, 2, 20)
        if clipped:
            op(f"norm {i}", [f"gradient {i}"], 0.5, 1)
        if i:
            op(f"into {i - 1}", reads, 2, 4)
        if not clipped:
            op(f"update {i}", [f"gradient {i}"], 1, 0)
    if clipped:
        op("factor", [f"norm {i}" for i in range(layers)], 0.5, 1)
        for i in reversed(range(layers)):
            op(f"update {i}", [f"gradient {i}", "factor"], 1, 0)
    reading = {f"update {i}": [f"layer {i}", *[f"into {i - 1}"][:i]] for i in range(layers)}
    readers = {place[update]: [place[name] for name in names] for update, names in reading.items()}
    columns = (list(column) for column in zip(*made.values(), strict=True))
    problem = Problem.from_dag(*columns, outputs=[place["loss"]], forward=layers + 1, overwrites=readers)
    once = {name: "tells the norm" for name in made if name.split()[0] in ("norm", "factor")}
    named = zip(problem.graph.ops, made, strict=True)
    ops = tuple(replace(op, name=name, pinned=once.get(name, op.pinned)) for op, name in named)
    return replace(problem, graph=replace(problem.graph, ops=ops))


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
    problem, gradients = whole_step(8, clipped=True), 20 * 8
    assert problem.keep_all_peak > gradients > 4 * min_budget(problem, time_limit=5).peak
    plan = solve(problem, gradients // 3, time_limit=2)
    again = [op.name for op, times in zip(problem.graph.ops, plan.schedule.recomputed, strict=True) if times]
    assert sum(name.startswith("gradient") for name in again) >= 4
    assert plan.cost < 2 * problem.keep_all_cost
    assert not wrong(problem, plan.schedule.R, gradients // 3)


def _found_from(task: Task, dearest: np.ndarray, every: Sequence[np.ndarray]) -> Iterator[np.ndarray | None]:
    """The answers of searches that begin with a schedule.

    Args:
        dearest: of the schedules within the budget, that with the most runs.
        every: all schedules, within the budget or not.
    """
    yield exchange(task, dearest)
    yield drop_runs(task.problem, task.budget, dearest, Clock(1.0))
    yield adapt(task, dearest)
    yield adapt(task, max(every, key=lambda R: float(R.sum())))
    yield TiltedPasses(task).search(Clock(0.05))
    yield Neighbourhoods(task).search(dearest, Clock(0.2))
