"""Cuts of the moments' model: every schedule obeys them, and with them the relaxation of many moments proves more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.cuts import PathCuts, rounded
from checkmate.solvers.linear.equations import cost_unit
from checkmate.solvers.linear.highs import SolveStatus
from checkmate.solvers.linear.model import NONE, Row
from checkmate.solvers.linear.moment_model import MomentModel, build
from tests.support.oracle import PLAIN_AND_WAYS, all_schedules, best_within, random_ruled_problem
from tests.support.paper_equations import violations
from tests.support.sampling import every, in_turn

MAKES = [*PLAIN_AND_WAYS, random_ruled_problem]


def cuts_of(x: MomentModel, seed: int) -> list[Row]:
    """Cuts that solutions of the relaxation break, and that points at random do."""
    rng, relaxation, cuts = np.random.default_rng(seed), highs.Relaxation(x.model), list[Row]()
    while (point := relaxation.solve().x) is not None:
        rows = [*PathCuts(x).broken(point), *rounded(x.fit, point)]
        if not rows:
            break
        relaxation.add(rows)
        cuts += rows
    for power in (0.2, 0.5, 1.0, 2.0):
        point = x.model.lower + (x.model.upper - x.model.lower) * rng.random(x.model.columns) ** power
        cuts += [*PathCuts(x).broken(point), *rounded(x.fit, point)]
    return cuts


def cases(seeds: range, most_ops: int) -> Iterator[tuple[int, Problem, int, float, MomentModel]]:
    """Small problems with their interesting budgets and optima, and a model of all or some moments of each."""
    for seed in seeds:
        problem, rng = MAKES[seed % len(MAKES)](seed, most_ops=most_ops), np.random.default_rng(seed)
        ops = len(problem.graph.ops)
        at = sorted(rng.choice(ops, ops if seed % 2 else int(rng.integers(2, ops + 1)), replace=False).tolist())
        for _, budget, best in best_within([problem]):
            yield seed, problem, budget, best, build(problem, budget, at)


@in_turn(first=every(4, range(0, 200, 20)))
def test_every_schedule_within_the_budget_obeys_each_cut(first: int) -> None:
    count = 0
    for seed, problem, budget, best, x in cases(range(first, first + 20), 4):
        if best == float("inf"):
            continue
        cuts, plain = cuts_of(x, seed), build(problem, budget, [int(begin) - 1 for begin in x.begins[1:]]).model
        count += len(cuts)
        x.model.constrain_rows("cuts", cuts)
        begins = [*x.begins.tolist(), len(problem.graph.ops)]
        for schedule in all_schedules(problem):
            if violations(schedule, problem, budget):
                continue
            # What this schedule runs between the moments is a solution with the cuts if it is one without.
            runs = np.array([schedule.R[a:b].any(axis=0) for a, b in itertools.pairwise(begins)])
            start = x.R[x.R != NONE], runs[: len(x.R)][x.R != NONE].astype(np.float64)
            if highs._completed(plain, start, 10.0, 0.0, 1) is not None:
                assert highs._completed(x.model, start, 10.0, 0.0, 1) is not None
    assert count


@in_turn(first=every(5, range(0, 400, 20)))
def test_the_relaxation_with_cuts_is_never_above_the_optimum(first: int) -> None:
    for seed, problem, _, best, x in cases(range(first, first + 20), 4):
        before, relaxation = highs.run(x.model, relax=True), highs.Relaxation(x.model)
        relaxation.add(cuts_of(x, seed))
        result = relaxation.solve()
        if result.outcome is SolveStatus.INFEASIBLE:
            assert best == float("inf")
            continue
        unit = cost_unit(problem)
        assert before.bound * unit <= result.bound * unit + 1e-6 <= best + 2e-6


def test_what_fits_obeys_each_rounded_row() -> None:
    rng, count = np.random.default_rng(0), 0
    for _ in range(300):
        sizes, columns = rng.integers(-3, 12, 6), rng.permutation(8)[:6]
        room = int(rng.integers(-2, max(0, sizes.sum()) + 1))
        points = np.array(list(itertools.product((0.0, 1.0), repeat=8)))
        fitting = points[points[:, columns] @ sizes <= room]
        for row in rounded([(columns, sizes, room)] * 5, rng.random(8)):
            count += 1
            assert (fitting[:, row.columns] @ row.coefficients <= row.upper + 1e-6).all()
    assert count > 300


def relaxed(problem: Problem, budget: int, moments: list[int], *, cut: bool) -> float:
    x = build(problem, budget, moments)
    relaxation = highs.Relaxation(x.model)
    while True:
        result = relaxation.solve()
        rows = [*PathCuts(x).broken(result.x), *rounded(x.fit, result.x)] if cut else []
        if not rows:
            return result.bound
        relaxation.drop_slack()
        relaxation.add(rows)


def test_with_cuts_more_moments_prove_no_less() -> None:
    problem = dags.gpt(4)
    begin, end = problem.graph.forward_length - 1, len(problem.graph.ops) - 1
    budget, moments = int(0.5 * problem.keep_all_peak), list(range(begin, end, (end - begin) // 7))
    fewer = relaxed(problem, budget, moments[::2], cut=False)
    assert relaxed(problem, budget, moments, cut=False) < fewer < relaxed(problem, budget, moments, cut=True)


@pytest.mark.parametrize(("budget", "least"), [(3, 45), (4, 26), (5, 22), (6, 21), (8, 19)])
def test_with_all_moments_a_relaxation_is_close_to_the_golden_optima_of_the_chain(budget: int, least: int) -> None:
    plain, cut = (relaxed(dags.unit_chain(8), budget, [*range(17)], cut=cut) for cut in (False, True))
    assert plain <= cut <= least + 1e-6
    assert cut > least - 1e-6 or plain + 1.5 < cut
