"""Addresses of a plan: each copy of a value and each workspace for as long as the simulator counts it."""

from __future__ import annotations

import pytest

import checkmate
from checkmate.core.plan import Run
from checkmate.core.simulator import simulate
from checkmate.look.addresses import storages_of
from checkmate.solvers.addresses import Block, live_peak, overlaps
from checkmate.solvers.common.incumbent import certify
from tests.support.by_hand import random_runs, runs_of
from tests.support.oracle import random_problem_with_ways
from tests.support.sampling import in_turn


@in_turn(seed=range(40))
def test_what_is_written_over_gives_its_place_and_nothing_else_overlaps(seed: int) -> None:
    problem = random_problem_with_ways(seed, most_ops=9)
    for R in (runs_of(problem), random_runs(problem, seed)):
        solution = certify(problem, 10**6, R, method="by hand")
        placed, usage = checkmate.addresses(solution), simulate(solution.plan, problem)
        for moment, taken in enumerate(usage.bytes_at):
            assert problem.resident + sum(b.bytes for b in placed.boxes if b.first <= moment <= b.last) == taken
        rounded = [Block(box.first, box.last + 1, -(-box.bytes // 64) * 64) for box in placed.boxes]
        assert not list(overlaps(rounded, [box.offset for box in placed.boxes]))
        assert all(box.offset % 64 == 0 for box in placed.boxes)
        assert live_peak(rounded) <= placed.bound <= placed.height
        runs = [step for step in solution.plan.steps if isinstance(step, Run)]
        names = [value.name for value in problem.graph.values]
        written = sorted((i, names[run.over]) for i, run in enumerate(runs) if run.over is not None)
        assert sorted((box.first, box.over) for box in placed.boxes if box.over) == written
        for box in placed.boxes:
            before = [b for b in placed.boxes if (b.name, b.last, b.offset) == (box.over, box.first - 1, box.offset)]
            assert len(before) == bool(box.over)
        assert len([*storages_of(solution)]) == len(placed.boxes) - len(written)


def test_without_a_plan_there_are_none() -> None:
    problem = checkmate.Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[100, 100])
    with pytest.raises(ValueError, match="no plan to place"):
        checkmate.addresses(checkmate.solve(problem, 150))
