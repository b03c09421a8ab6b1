"""Addresses of a plan: each copy of a value and each workspace for as long as the simulator counts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import checkmate
from benchmarks.networks import dags
from checkmate.core.simulator import simulate
from checkmate.solvers.addresses import Block, overlaps


def _blocks(placed: checkmate.Addresses) -> list[Block]:
    return [Block(box.first, box.last + 1, box.bytes) for box in placed.boxes]


@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("network", [dags.resnet, dags.unet, dags.mobilenet])
def test_as_the_simulator_counts(network: Callable[[], checkmate.Problem], share: float) -> None:
    problem = network()
    solution = checkmate.solve(problem, int(share * problem.keep_all_peak), method="next-use")
    assert solution.plan is not None
    placed = checkmate.addresses(solution)
    usage = simulate(solution.plan, problem)
    for moment, taken in enumerate(usage.bytes_at):
        alive = sum(box.bytes for box in placed.boxes if box.first <= moment <= box.last)
        assert problem.resident + alive == taken
    assert not list(overlaps(_blocks(placed), [box.offset for box in placed.boxes]))
    assert all(box.offset % 64 == 0 for box in placed.boxes)
    assert usage.peak - problem.resident <= placed.bound <= placed.height


def test_it_prints_and_gives_records() -> None:
    problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[128, 256, 256, 64])
    placed = checkmate.addresses(checkmate.solve(problem, "1 kB"))
    assert "4 boxes in an arena of 640 B" in str(placed)
    assert "no placement is lower" in str(placed)
    assert placed.records()[0] == {
        "name": "v0",
        "role": "activations",
        "first": 0,
        "last": 3,
        "offset": 512,
        "bytes": 128,
    }


def test_without_a_plan_there_are_none() -> None:
    problem = checkmate.Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[100, 100])
    with pytest.raises(ValueError, match="no addresses without a plan"):
        checkmate.addresses(checkmate.solve(problem, 150))
